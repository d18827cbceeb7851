"""The recipes: what a setting is when RUN.toml does not say, from the paper or from its authors' scripts."""

from __future__ import annotations

from typing import Any, Literal

from tapfm.encoders.card import EncoderCard

Recipe = Literal["paper", "reference"]
Method = Literal["tapfm", "finetune", "fixed"]
Settings = dict[str, dict[str, Any]]

# The paper draws 300 tiles with UNI, 100 with GigaPath, 75 with H-optimus-0: as many as its GPU holds. Other encoders
# get the number of the one whose cost per tile they do not exceed.
_TILES_BY_GFLOPS = ((165.0, 300), (460.0, 100), (float("inf"), 75))

# The paper's rates are for encoders of 300 million parameters and more, trained on thousands of slides. Small ones that
# come with tapfm, to try it on tens of painted slides, need larger steps.
_POCKET_RATES = {"encoder_lr": 1e-4, "aggregator_lr": 1e-3}


def recipe_settings(recipe: Recipe, card: EncoderCard, method: Method, epochs: int | None = None) -> Settings:
    """Say what a recipe says, for an encoder, a method, and a number of epochs where it is given."""
    settings = _paper(card, method)
    if recipe == "reference":
        for section, values in _reference(epochs or settings["schedule"]["epochs"]).items():
            settings[section] |= values
    if card.packaged:
        settings["optimiser"] |= _POCKET_RATES
    return settings


def _paper(card: EncoderCard, method: Method) -> Settings:
    """Section 2 of the method: the paper's protocol."""
    return {
        "aggregator": {"name": "cls-attention" if method == "tapfm" else "abmil"},
        "task": {"weighting": "balanced"},
        "head": {"layer_norm": False, "label_smoothing": 0.0},
        "adaptation": {
            "lambda": 1.0 if method == "tapfm" else 0.0,
            "beta": 0.0,
            "tau": 1.0,
            "tiles_per_slide": "all" if method == "fixed" else _tiles_per_slide(card),
        },
        "optimiser": {"encoder_lr": 1e-6, "aggregator_lr": 1e-5, "weight_decay": 1e-4, "decay_all": True},
        "schedule": {
            "epochs": 20 if method == "tapfm" else 50,
            "first_cycle": 10,
            "cycle_factor": 2,
            "encoder_lr_min": 0.0,
            "aggregator_lr_min": 0.0,
        },
        "augmentation": {"flip": 0.5, "quarter_turns": True, "blur": 0.5, "blur_radius": [0.1, 0.8]},
        "selection": {"validation_tiles": "all"},
    }


def _reference(epochs: int) -> Settings:
    """Where the scripts of the paper's authors differ from it."""
    return {
        "task": {"weighting": "reference"},
        "head": {"layer_norm": True, "label_smoothing": 0.1},
        "adaptation": {"tau": 0.1},
        "optimiser": {"weight_decay": 0.01, "decay_all": False},
        "schedule": {"first_cycle": epochs, "encoder_lr_min": 1e-8, "aggregator_lr_min": 1e-7},
        "selection": {"validation_tiles": 1000},
    }


def _tiles_per_slide(card: EncoderCard) -> int:
    """Say how many tiles a step takes, by what one costs."""
    cost = card.gflops if card.gflops is not None else card.parameters * 400 / 1e9  # about 200 tokens, 2 per weight
    return next(tiles for limit, tiles in _TILES_BY_GFLOPS if cost <= limit)

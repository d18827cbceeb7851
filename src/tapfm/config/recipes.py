"""Recipes: default settings from the paper, or from the scripts of its authors."""

from __future__ import annotations

from typing import Any, Literal

from tapfm.encoders.card import EncoderCard

Recipe = Literal["paper", "reference"]
Method = Literal["tapfm", "finetune", "fixed"]
Settings = dict[str, dict[str, Any]]

# (maximum GFLOP per tile, tiles per slide). The paper samples as many tiles per slide as fit on its GPU: 300 with UNI
# (ViT-L), 100 with GigaPath and 75 with H-optimus-0 (both ViT-g). Other encoders get the number of tiles for
# their cost: 165 is the most that a ViT-L of the catalogue needs, 460 is just above GigaPath.
_TILES_BY_GFLOPS = ((165.0, 300), (460.0, 100), (float("inf"), 75))

# The paper's learning rates are for encoders with 300 million parameters or more, trained on thousands of slides. The
# small encoders packaged with tapfm, for tens of synthetic slides, need larger learning rates.
_LEARNING_RATES_OF_PACKAGED_ENCODERS = {"encoder_lr": 1e-4, "aggregator_lr": 1e-3}


def build_recipe_settings(recipe: Recipe, card: EncoderCard, method: Method, epochs: int | None = None) -> Settings:
    """Return the default settings of a recipe. They depend on the encoder, the method and the number of epochs.

    epochs: None for the default of the method.
    """
    settings = _paper_settings(card, method)
    if recipe == "reference":
        for section, values in _reference_code_settings(epochs or settings["schedule"]["epochs"]).items():
            settings[section] |= values
    if card.packaged:
        settings["optimiser"] |= _LEARNING_RATES_OF_PACKAGED_ENCODERS
    return settings


def _paper_settings(card: EncoderCard, method: Method) -> Settings:
    """Return the default settings of the recipe `paper`."""
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
        "augmentation": {"flip": 0.5, "rotate_90": True, "blur": 0.5, "blur_radius": [0.1, 0.8]},
        "selection": {"validation_tiles": "all"},
    }


def _reference_code_settings(epochs: int) -> Settings:
    """Return the default settings of the recipe `reference` that differ from those of `paper`."""
    return {
        "task": {"weighting": "reference"},
        "head": {"layer_norm": True, "label_smoothing": 0.1},
        "adaptation": {"tau": 0.1},
        "optimiser": {"weight_decay": 0.01, "decay_all": False},
        "schedule": {"first_cycle": epochs, "encoder_lr_min": 1e-8, "aggregator_lr_min": 1e-7},
        "selection": {"validation_tiles": 1000},
    }


def _tiles_per_slide(card: EncoderCard) -> int:
    """Return the number of tiles to sample from a slide, which depends on the GFLOP per tile of the encoder."""
    # estimate if unknown: about 200 tokens per tile, 2 FLOP per parameter and token
    cost = card.gflops if card.gflops is not None else card.parameters * 400 / 1e9
    return next(tiles for limit, tiles in _TILES_BY_GFLOPS if cost <= limit)

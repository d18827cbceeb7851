"""Presets of `tapfm study`: comparisons of the paper, further ones, and small versions for synthetic slides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tapfm.errors import UnknownNameError


@dataclass(frozen=True)
class Preset:
    """Settings of STUDY.toml, except for the slides.

    mini_overrides: settings that differ in the small version, for synthetic slides and tapfm-pocket.
    """

    summary: str
    study: Mapping[str, Any]
    mini_overrides: Mapping[str, Any] = field(default_factory=dict)
    synth_task: str = "fgfr3"  # of the synthetic slides


def _vary_setting(key: str, values: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return one variant per value of a setting of [adaptation]. The keys of `values` are the names of the variants."""
    return [{"name": name, "settings": {"adaptation": {key: value}}} for name, value in values.items()]


_MIL_AGGREGATORS = ["dsmil", "clam", "varmil", "abmil"]  # in the order of the paper's table
_MINI_FIT = {"schedule": {"epochs": 20}, "selection": {"validation_tiles": 8}}  # the paper fits epochs 2 to 20
_MINI_ABLATION = {"settings": {**_MINI_FIT, "adaptation": {"tiles_per_slide": 8}}}
_ONLY_TAPFM = {
    "targets": ["FGFR3"],
    "encoders": ["h-optimus-0"],
    "methods": ["tapfm"],
    "tapfm_aggregators": ["cls-attention"],
}


def _ablation_study(name: str, variants: list[dict[str, Any]], note: str) -> dict[str, Any]:
    return {"name": name, "report": "ablation", **_ONLY_TAPFM, "variants": variants, "notes": [note]}


PRESETS: dict[str, Preset] = {
    "paper-table1": Preset(
        "table 1 of the paper: three encoders, three methods, four MIL aggregators; also cls-gated, not in the paper",
        {
            "name": "Binary targets",
            "targets": ["FGFR3"],
            "task": "binary",
            "encoders": ["uni", "gigapath", "h-optimus-0"],
            "methods": ["fixed", "finetune", "tapfm"],
            "aggregators": _MIL_AGGREGATORS,
            "tapfm_aggregators": ["cls-attention", "cls-gated"],
            "notes": [
                "AUC in the paper (FGFR3; 194 test patients and 260 external patients of TCGA): best fixed encoder "
                "0.8412 and 0.8786, best fine-tuned encoder 0.8526 and 0.8889, H-optimus-0 (TAPFM) 0.8647 and 0.9021."
            ],
        },
    ),
    "paper-table2": Preset(
        "table 2 of the paper: one model for several targets; also ABMIL and cls-gated, not in the paper's table",
        {
            "name": "One model for several targets",
            "targets": ["EGFR", "KRAS", "MET", "ALK"],
            "task": "multilabel",
            "encoders": ["gigapath", "h-optimus-0"],
            "methods": ["fixed", "finetune", "tapfm"],
            "aggregators": ["abmil"],
            "tapfm_aggregators": ["cls-attention", "cls-gated"],
            "notes": [
                "Macro-average AUC in the paper (876 test patients and 438 external patients of TCGA): GigaPath "
                "(TAPFM) 0.8439 and 0.8392, H-optimus-0 (TAPFM) 0.8510 and 0.8439."
            ],
        },
        synth_task="luad4",
    ),
    "ablation-lambda": Preset(
        "weight of the attention loss: 0.25, 0.5, 0.75, 1",
        _ablation_study(
            "Weight of the attention loss",
            _vary_setting("lambda", {f"lambda {value:g}": value for value in (0.25, 0.5, 0.75, 1.0)}),
            "Fit of log L = a + b k in the paper, where L is the training loss in epoch k, for lambda 0.25, 0.5, 0.75 "
            "and 1 (H-optimus-0, FGFR3): b = -0.0701, -0.0718, -0.0706, -0.0810; R² = 0.9737, 0.9808, 0.9765, 0.9693.",
        ),
        _MINI_ABLATION,
    ),
    "ablation-tiles": Preset(
        "tiles per slide and step: 25, 50, 75",
        _ablation_study(
            "Tiles per slide and step",
            _vary_setting("tiles_per_slide", {f"{count} tiles": count for count in (25, 50, 75)}),
            "Fit of log L = a + b k in the paper, where L is the training loss in epoch k, for 25, 50 and 75 tiles "
            "(H-optimus-0, FGFR3): b = -0.0532, -0.0569, -0.0725; R² = 0.9731, 0.9811, 0.9752. Validation AUC: 0.8527, "
            "0.8764, 0.8960.",
        ),
        {
            "settings": _MINI_FIT,
            "variants": _vary_setting("tiles_per_slide", {f"{count} tiles": count for count in (8, 16, 24)}),
        },
    ),
    "ablation-cosine": Preset(
        "weight of the cosine loss: 0, 0.01, 0.1, 1",
        _ablation_study(
            "Weight of the cosine loss",
            _vary_setting("beta", {f"beta {value:g}": value for value in (0.0, 0.01, 0.1, 1.0)}),
            "The paper states no value of beta, and reports that the cosine loss made no significant difference.",
        ),
        _MINI_ABLATION,
    ),
    "stability": Preset(
        "order of updates (before, after, joint), to test the paper's proposition about stability",
        {
            "name": "Order of updates",
            "report": "stability",
            **_ONLY_TAPFM,
            "seeds": [0, 1, 2, 3, 4],
            "variants": _vary_setting("bag_gradient", {order: order for order in ("before", "after", "joint")}),
        },
        {"seeds": [0, 1], "settings": {"schedule": {"epochs": 12}, "adaptation": {"tiles_per_slide": 8}}},
    ),
    "layers": Preset(
        "trainable part of the encoder: all, the last 1, 4 or 12 blocks, LoRA",
        {
            "name": "Trainable part of the encoder",
            **_ONLY_TAPFM,
            "variants": _vary_setting(
                "scope",
                {
                    "all": "full",
                    "last block": "last:1",
                    "last 4 blocks": "last:4",
                    "last 12 blocks": "last:12",
                    "LoRA, rank 16": "lora:16",
                },
            ),
            "notes": ["The paper does not answer which layers benefit most from adaptation."],
        },
        {
            "variants": _vary_setting(
                "scope", {"all": "full", "last block": "last:1", "last 2 blocks": "last:2", "LoRA, rank 4": "lora:4"}
            )
        },
    ),
    "forgetting": Preset(
        "a linear probe on an unrelated tile task, before and after adaptation",
        {
            "name": "Forgetting after adaptation",
            "report": "forgetting",
            "targets": ["FGFR3"],
            "encoders": ["h-optimus-0"],
            "methods": ["finetune", "tapfm"],
            "aggregators": ["abmil"],
            "tapfm_aggregators": ["cls-attention"],
            "notes": [
                "The paper argues that TAPFM preserves what the encoder learned in pretraining. This study measures it."
            ],
        },
    ),
}

# presets that `--preset all --scale mini` runs
PRESETS_IN_ALL = ("paper-table1", "paper-table2", "ablation-lambda", "ablation-tiles", "ablation-cosine")

MINI_NOTE = (
    "Small version: synthetic slides, an encoder with 0.9 million parameters, few tiles and few epochs (see below). "
    "It checks that the commands work. It says nothing about real tissue, or about which method is better."
)
MINI_SETTINGS: Mapping[str, Any] = {
    "encoders": ["tapfm-pocket"],
    "settings": {
        "adaptation": {"tiles_per_slide": 12},
        "schedule": {"epochs": 8},
        "selection": {"validation_tiles": 16},
        "machine": {"workers": 1},
        "fixed": {"adaptation": {"tiles_per_slide": "all"}, "schedule": {"epochs": 20}},
    },
}


def get_preset(name: str) -> Preset:
    """Return a preset by name. Raises UnknownNameError."""
    if name not in PRESETS:
        raise UnknownNameError.with_suggestions("preset", name, [*PRESETS, "all"], see=", ".join([*PRESETS, "all"]))
    return PRESETS[name]

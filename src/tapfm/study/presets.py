"""The paper's grids, ready for a lab with its own slides; and small forms of them for painted slides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tapfm.errors import UnknownNameError


@dataclass(frozen=True)
class Preset:
    """Tables of STUDY.toml, but for the slides; `mini` is laid over them for painted slides and tapfm-pocket."""

    summary: str
    study: Mapping[str, Any]
    mini: Mapping[str, Any] = field(default_factory=dict)
    synth_task: str = "fgfr3"  # the task of `tapfm synth`


def _varied(key: str, values: Mapping[str, object]) -> list[dict[str, Any]]:
    """Vary one setting of [adaptation]."""
    return [{"name": name, "settings": {"adaptation": {key: value}}} for name, value in values.items()]


_MIL = ["dsmil", "clam", "varmil", "abmil"]  # in the order of the paper's table
_MINI_FIT = {"schedule": {"epochs": 20}, "selection": {"validation_tiles": 8}}  # epochs enough for the paper's fit
_MINI_ABLATION = {"settings": {**_MINI_FIT, "adaptation": {"tiles_per_slide": 8}}}
_ONLY_TAPFM = {
    "targets": ["FGFR3"],
    "encoders": ["h-optimus-0"],
    "regimes": ["tapfm"],
    "tapfm_aggregators": ["cls-attention"],
}


def _ablation(name: str, variants: list[dict[str, Any]], note: str) -> dict[str, Any]:
    return {"name": name, "report": "ablation", **_ONLY_TAPFM, "variants": variants, "notes": [note]}


PRESETS: dict[str, Preset] = {
    "paper-table1": Preset(
        "three encoders, three regimes, four MIL aggregators; cls-gated is ours",
        {
            "name": "Binary targets",
            "targets": ["FGFR3"],
            "task": "binary",
            "encoders": ["uni", "gigapath", "h-optimus-0"],
            "regimes": ["fixed", "finetune", "tapfm"],
            "aggregators": _MIL,
            "tapfm_aggregators": ["cls-attention", "cls-gated"],
            "notes": [
                "The paper (FGFR3, 194 test patients, 260 of TCGA): best fixed 0.8412 and 0.8786, best fine-tuned "
                "0.8526 and 0.8889, H-optimus-0 (TAPFM) 0.8647 and 0.9021."
            ],
        },
    ),
    "paper-table2": Preset(
        "several targets at once; with ABMIL beside, which the paper leaves out",
        {
            "name": "Several targets at once",
            "targets": ["EGFR", "KRAS", "MET", "ALK"],
            "task": "multilabel",
            "encoders": ["gigapath", "h-optimus-0"],
            "regimes": ["fixed", "finetune", "tapfm"],
            "aggregators": ["abmil"],
            "tapfm_aggregators": ["cls-attention", "cls-gated"],
            "notes": [
                "The paper (876 test patients, 438 of TCGA), macro average: GigaPath (TAPFM) 0.8439 and 0.8392, "
                "H-optimus-0 (TAPFM) 0.8510 and 0.8439."
            ],
        },
        synth_task="luad4",
    ),
    "ablation-lambda": Preset(
        "weight of the attention loss: 0.25, 0.5, 0.75, 1",
        _ablation(
            "Weight of the attention loss",
            _varied("lambda", {f"lambda {value:g}": value for value in (0.25, 0.5, 0.75, 1.0)}),
            "The paper (H-optimus-0, FGFR3): b = -0.0701, -0.0718, -0.0706, -0.0810; R² = 0.9737, 0.9808, 0.9765, "
            "0.9693.",
        ),
        _MINI_ABLATION,
    ),
    "ablation-tiles": Preset(
        "tiles of a slide in a step: 25, 50, 75",
        _ablation(
            "Tiles of a slide in a step",
            _varied("tiles_per_slide", {f"{count} tiles": count for count in (25, 50, 75)}),
            "The paper (H-optimus-0, FGFR3): b = -0.0532, -0.0569, -0.0725; R² = 0.9731, 0.9811, 0.9752; validation "
            "AUC 0.8527, 0.8764, 0.8960.",
        ),
        {
            "settings": _MINI_FIT,
            "variants": _varied("tiles_per_slide", {f"{count} tiles": count for count in (8, 16, 24)}),
        },
    ),
    "ablation-cosine": Preset(
        "weight of the cosine term: 0, 0.01, 0.1, 1",
        _ablation(
            "Weight of the cosine term",
            _varied("beta", {f"beta {value:g}": value for value in (0.0, 0.01, 0.1, 1.0)}),
            "The paper names no value of beta, and says that the term made no significant difference.",
        ),
        _MINI_ABLATION,
    ),
    "stability": Preset(
        "gradients before, after, or updates at once: the paper's proposition",
        {
            "name": "Order of updates",
            "report": "stability",
            **_ONLY_TAPFM,
            "seeds": [0, 1, 2, 3, 4],
            "variants": _varied("bag_gradient", {order: order for order in ("before", "after", "joint")}),
        },
        {"seeds": [0, 1], "settings": {"schedule": {"epochs": 12}, "adaptation": {"tiles_per_slide": 8}}},
    ),
    "layers": Preset(
        "what of the encoder learns: all, the last 1, 4 or 12 blocks, LoRA",
        {
            "name": "What of the encoder learns",
            **_ONLY_TAPFM,
            "variants": _varied(
                "scope",
                {
                    "all": "full",
                    "last block": "last:1",
                    "last 4 blocks": "last:4",
                    "last 12 blocks": "last:12",
                    "LoRA, rank 16": "lora:16",
                },
            ),
            "notes": ["The paper leaves open which layers gain most from adaptation."],
        },
        {
            "variants": _varied(
                "scope", {"all": "full", "last block": "last:1", "last 2 blocks": "last:2", "LoRA, rank 4": "lora:4"}
            )
        },
    ),
    "forgetting": Preset(
        "a linear probe on an unrelated tile task, before and after",
        {
            "name": "What adaptation forgets",
            "report": "forgetting",
            "targets": ["FGFR3"],
            "encoders": ["h-optimus-0"],
            "regimes": ["finetune", "tapfm"],
            "aggregators": ["abmil"],
            "tapfm_aggregators": ["cls-attention"],
            "notes": ["The paper argues that TAPFM does not forget what the encoder knew; here that is measured."],
        },
    ),
}

# what `--preset all --scale mini` runs
ALL = ("paper-table1", "paper-table2", "ablation-lambda", "ablation-tiles", "ablation-cosine")

MINI_NOTE = (
    "Scaled down: painted slides, an encoder of 0.9 million parameters, few tiles and few epochs (below). This shows "
    "that the commands work. It says nothing about tissue, nor which method is better."
)
MINI: Mapping[str, Any] = {
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
    """Find a preset by its name."""
    if name not in PRESETS:
        raise UnknownNameError.with_suggestions("preset", name, [*PRESETS, "all"], see=", ".join([*PRESETS, "all"]))
    return PRESETS[name]

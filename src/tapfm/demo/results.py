"""The results of a demo, read from its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tapfm.demo.folder import COHORTS, DemoFolder
from tapfm.evaluation.estimate_text import format_estimate
from tapfm.results.estimate import Estimate
from tapfm.runtime.csv_files import read_csv

_REGIMES = {
    "fixed": "fixed encoder + ABMIL",
    "finetune": "fine-tuned encoder + ABMIL",
    "tapfm": "TAPFM",
}
_RANKED_BY = {
    "attention before": "attention, pretrained encoder",
    "attention after": "attention, after TAPFM",
    "contribution after": "contribution, after TAPFM",
}


@dataclass(frozen=True)
class DemoResults:
    """What a demo ends with; the keys of mappings are cohorts, "test" and "external", where nothing else is said."""

    folder: DemoFolder
    patients: Mapping[str, str]
    aucs: Mapping[str, Mapping[str, str]]  # regime -> cohort -> AUC with its interval
    positive_slides: Mapping[str, int]
    planted_share: Mapping[str, float | None]  # of tiles with the planted signal
    ranked: Mapping[str, Sequence[str]]  # score -> how often planted tiles rank above others, in each cohort
    seconds: int  # all steps, all attempts


def read_results(folder: DemoFolder) -> DemoResults:
    """Read the results of a finished demo."""
    lines = read_csv(folder.results)
    patients = {line["cohort"]: line["patients"] for line in lines}
    aucs: dict[str, dict[str, str]] = {}
    for line in lines:
        aucs.setdefault(_REGIMES.get(line["regime"], line["model"]), {})[line["cohort"]] = _auc_text(line)
    found: dict[str, Any] = json.loads(folder.planted.read_text("utf-8"))
    return DemoResults(
        folder,
        patients={cohort: patients.get(cohort, "0") for cohort in COHORTS},
        aucs=aucs,
        positive_slides={cohort: found[cohort]["slides"] for cohort in COHORTS},
        planted_share={cohort: found[cohort]["share"] for cohort in COHORTS},
        ranked={
            title: [format_estimate(Estimate(**found[cohort]["found"][score])) for cohort in COHORTS]
            for score, title in _RANKED_BY.items()
        },
        seconds=round(sum(json.loads(folder.state.read_text("utf-8"))["seconds"].values())),
    )


def _auc_text(line: Mapping[str, str]) -> str:
    value, low, high = (float(line[name]) if line[name] else None for name in ("auc", "low", "high"))
    return format_estimate(Estimate(value, low, high)) if value is not None else line["why"] or "-"

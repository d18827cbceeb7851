"""Read the results of a finished demo."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapfm.demo.folder import COHORTS, DemoFolder
from tapfm.demo.sizes import TARGET
from tapfm.results.estimate import Estimate
from tapfm.results.table import Cell, Column, Table, table_row
from tapfm.runtime.csv_files import read_csv
from tapfm.runtime.messages import format_count
from tapfm.study.comparison import parse_auc_row

_COHORT_TITLES = {"test": "held-out", "external": "external"}
_METHOD_TITLES = {"fixed": "fixed encoder + ABMIL", "finetune": "fine-tuned encoder + ABMIL", "tapfm": "TAPFM"}
_SCORE_TITLES = {
    "attention_before": "attention, pretrained encoder",
    "attention_after": "attention, after TAPFM",
    "contribution_after": "contribution, after TAPFM",
}


@dataclass(frozen=True)
class DemoResults:
    """Tables that the demo prints at its end."""

    folder: DemoFolder
    aucs: Table
    attention_check: Table  # how well attention ranks tiles with the planted signal
    seconds: int  # duration of all steps, including earlier attempts


def read_results(folder: DemoFolder) -> DemoResults:
    measured = json.loads(folder.attention_check.read_text("utf-8"))
    seconds = json.loads(folder.state.read_text("utf-8"))["seconds"]
    return DemoResults(folder, _auc_table(folder), _attention_check_table(measured), round(sum(seconds.values())))


def _auc_table(folder: DemoFolder) -> Table:
    patients, aucs = dict.fromkeys(COHORTS, "0"), dict[str, dict[str, Cell]]()
    for line in read_csv(folder.auc_table):
        patients[line["cohort"]] = line["patients"]
        title = _METHOD_TITLES.get(line["method"], line["model"])
        aucs.setdefault(title, {})[line["cohort"]] = _cell(parse_auc_row(line))
    titles = [f"{_COHORT_TITLES[cohort]} ({patients[cohort]} patients)" for cohort in COHORTS]
    rows = [
        table_row(title, *(cells.get(cohort, Estimate(None)) for cohort in COHORTS)) for title, cells in aucs.items()
    ]
    return Table([Column("", text=True), *map(Column, titles)], rows, f"AUC, {TARGET}")


def _attention_check_table(measured: Mapping[str, Any]) -> Table:
    columns = [Column("ranked by", text=True)]
    for cohort in COHORTS:
        slides, fraction = measured[cohort]["slides"], measured[cohort]["signal_tile_fraction"]
        tiles = "" if fraction is None else f", {fraction:.0%} of tiles with signal"
        columns.append(Column(f"{_COHORT_TITLES[cohort]} ({format_count(slides, 'slide')}{tiles})"))
    rows = [
        table_row(title, *(_cell(Estimate(**measured[cohort]["mean_auc"][score])) for cohort in COHORTS))
        for score, title in _SCORE_TITLES.items()
    ]
    title = "AUC of tiles with the planted signal against other tiles (mean over positive slides; chance: 0.5)"
    return Table(columns, rows, title)


def _cell(estimate: Estimate) -> Cell:
    return Cell(estimate, estimate.reason if estimate.value is None else "")

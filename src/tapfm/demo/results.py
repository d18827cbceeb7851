"""The results of a demo, read from its files."""

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
_REGIMES = {"fixed": "fixed encoder + ABMIL", "finetune": "fine-tuned encoder + ABMIL", "tapfm": "TAPFM"}
_SCORES = {
    "attention before": "attention, pretrained encoder",
    "attention after": "attention, after TAPFM",
    "contribution after": "contribution, after TAPFM",
}


@dataclass(frozen=True)
class DemoResults:
    """The tables that a demo ends with."""

    folder: DemoFolder
    aucs: Table
    attention_check: Table  # how often tiles with the planted signal rank above others
    seconds: int  # of all steps in all attempts


def read_results(folder: DemoFolder) -> DemoResults:
    """Read the results of a finished demo."""
    planted = json.loads(folder.attention_check.read_text("utf-8"))
    seconds = json.loads(folder.state.read_text("utf-8"))["seconds"]
    return DemoResults(folder, _auc_table(folder), _attention_check_table(planted), round(sum(seconds.values())))


def _auc_table(folder: DemoFolder) -> Table:
    patients, aucs = dict.fromkeys(COHORTS, "0"), dict[str, dict[str, Cell]]()
    for line in read_csv(folder.results):
        patients[line["cohort"]] = line["patients"]
        title = _REGIMES.get(line["regime"], line["model"])
        aucs.setdefault(title, {})[line["cohort"]] = _cell(parse_auc_row(line))
    titles = [f"{_COHORT_TITLES[cohort]} ({patients[cohort]} patients)" for cohort in COHORTS]
    rows = [
        table_row(title, *(cells.get(cohort, Estimate(None)) for cohort in COHORTS)) for title, cells in aucs.items()
    ]
    return Table([Column("", text=True), *map(Column, titles)], rows, f"AUC, {TARGET}")


def _attention_check_table(planted: Mapping[str, Any]) -> Table:
    columns = [Column("ranked by", text=True)]
    for cohort in COHORTS:
        slides, share = planted[cohort]["slides"], planted[cohort]["share"]
        carry = "" if share is None else f", {share:.0%} of tiles with it"
        columns.append(Column(f"{_COHORT_TITLES[cohort]} ({format_count(slides, 'slide')}{carry})"))
    rows = [
        table_row(title, *(_cell(Estimate(**planted[cohort]["found"][score])) for cohort in COHORTS))
        for score, title in _SCORES.items()
    ]
    title = "How often a tile with the planted signal ranks above one without (mean of positive slides; chance: 0.5)"
    return Table(columns, rows, title)


def _cell(estimate: Estimate) -> Cell:
    return Cell(estimate, estimate.reason if estimate.value is None else "")

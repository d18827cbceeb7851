"""Read the results of a finished demo."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tapfm.demo.folder import COHORTS, DemoFolder
from tapfm.demo.sizes import TARGET
from tapfm.results.estimate import Estimate
from tapfm.results.table import Cell, Column, Table, table_row
from tapfm.runtime.csv_files import read_csv
from tapfm.runtime.messages import format_count
from tapfm.study.comparison import COHORT_TITLES
from tapfm.study.headline import CHOSEN, VALIDATION_TITLE, read_headline_rows
from tapfm.study.validation import CHOICE_RULE

_COHORT_TITLES = {"test": "held-out", "external": "external"}
# by title in the headline of the study
_SET_TITLES = {VALIDATION_TITLE: "validation"} | {
    COHORT_TITLES[cohort]: title for cohort, title in _COHORT_TITLES.items()
}
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
    """Return the AUCs of each method; the one that is chosen on validation is marked."""
    lines = read_csv(folder.auc_table)
    titles = {line["model"]: _METHOD_TITLES.get(line["method"], line["model"]) for line in lines}
    rows = [replace(row, model=titles[row.model]) for row in read_headline_rows(lines)]
    columns = [Column("", text=True)]
    for name, title in _SET_TITLES.items():
        patients = next((row.aucs[name].patients for row in rows if name in row.aucs), 0)
        columns.append(Column(f"{title} ({format_count(patients, 'patient')})"))
    table_rows = [
        table_row(
            f"{row.model} *" if row.chosen else row.model,
            *(_cell(row.aucs[name].auc) if name in row.aucs else Cell() for name in _SET_TITLES),
        )
        for row in rows
    ]
    note = f"* {CHOSEN}: {CHOICE_RULE}. The held-out and external slides are not used to choose."
    return Table(columns, table_rows, f"AUC, {TARGET}", [note] if any(row.chosen for row in rows) else [])


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

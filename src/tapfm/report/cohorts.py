"""The slides of a report, counted: by split, by label, and by where they come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tapfm.cohort.cohort_table import read_cohort
from tapfm.cohort.splits import SPLITS, VALIDATION
from tapfm.errors import TapfmError
from tapfm.evaluation.predictions import Prediction
from tapfm.report.content import Block
from tapfm.report.result import EvaluatedSlideSet
from tapfm.report.runs import ReportedRun
from tapfm.results.document import Paragraph
from tapfm.results.table import Column, Row, Table, table_row
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.labels import label_count_cells, label_count_columns
from tapfm.tasks.target import TargetKinds

# columns of a cohort's table that say where a slide comes from
_ORIGINS = ("site", "centre", "center", "hospital", "scanner", "vendor", "objective", "magnification", "mpp", "stain")
_MOST_VALUES = 6


def cohort_blocks(run: ReportedRun, results: Sequence[EvaluatedSlideSet]) -> list[Block]:
    """Count slides, patients and labels of each split, and of each other set that was evaluated."""
    targets = target_kinds(run.targets)
    rows = [_split_row(_name_of_split(split), run.of_split(split), targets) for split in SPLITS if run.of_split(split)]
    own = {row.get("slide_id") for row in run.slides}
    for result in results:
        if not result.own or not {each.slide_id for each in result.predictions} <= own:
            rows.append(_prediction_row(result.title, result.predictions, targets))
    columns = [
        Column("", text=True),
        Column("patients"),
        Column("slides"),
        Column("tiles"),
        *label_count_columns(targets),
    ]
    blocks: list[Block] = [Table(columns, rows)]
    origins = _origins_of(run)
    if origins:
        columns = [Column("", text=True), *(Column(name, text=True) for name in origins)]
        table = [
            table_row(_name_of_split(split), *(values[split] for values in origins.values()))
            for split in SPLITS
            if run.of_split(split)
        ]
        blocks.append(Table(columns, table, "Where the slides come from"))
    return [*blocks, *_lost(run)]


def _name_of_split(split: str) -> str:
    """Write a split as a word."""
    return {"train": "training", VALIDATION: "validation"}.get(split, split)


def _split_row(title: str, rows: Sequence[Mapping[str, str]], targets: TargetKinds) -> Row:
    """Count one split of a run."""
    patients = len({(row.get("cohort"), row.get("patient_id")) for row in rows})
    tiles = sum(int(row["tiles"]) for row in rows if row.get("tiles"))
    return table_row(title, patients, len(rows), tiles or None, *label_count_cells(rows, targets))


def _prediction_row(title: str, predictions: Sequence[Prediction], targets: TargetKinds) -> Row:
    """Count a set that was evaluated."""
    patients = len({(each.cohort, each.patient_id) for each in predictions})
    counts = [kind.count_cell([each.labels.get(target) for each in predictions]) for target, kind in targets.items()]
    return table_row(title, patients, len(predictions), sum(each.tiles for each in predictions) or None, *counts)


def _origins_of(run: ReportedRun) -> dict[str, dict[str, str]]:
    """Say, by column and split, where the slides come from, as far as the cohort's table tells and is still there."""
    table = Path(str(run.settings.get("cohort", {}).get("table", "")))
    found: dict[str, dict[str, str]] = {}  # column -> slide -> value
    if any(row.get("cohort") for row in run.slides):
        found["cohort"] = {row["slide_id"]: row["cohort"] for row in run.slides}
    if table.is_file():
        try:
            rows = read_cohort(table, must_exist=False).rows
        except TapfmError:  # it was changed since; the page does without
            rows = ()
        for row in rows:
            values = {"mpp": "" if row.mpp is None else f"{row.mpp:g}"} | dict(row.labels)
            for name, value in values.items():
                if name.lower() in _ORIGINS:
                    found.setdefault(name, {})[row.slide_id] = value
    return {
        name: {split: _counts(of_slide.get(row["slide_id"], "") for row in run.of_split(split)) for split in SPLITS}
        for name, of_slide in found.items()
        if any(of_slide.values())
    }


def _counts(values: Iterable[str]) -> str:
    """Write how many slides have which value."""
    counted = Counter(value or "not said" for value in values)
    if len(counted) > _MOST_VALUES:
        most = counted.most_common(_MOST_VALUES - 1)
        rest = len(counted) - len(most)
        return ", ".join(f"{name} {count:,}" for name, count in most) + f", and {rest:,} others"
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counted.items()))


def _lost(run: ReportedRun) -> list[Block]:
    """Say how many slides failed in training."""
    failed = sum(row.get("problem") == "failed" for row in run.failures)
    return [Paragraph(f"Of these, {failed:,} failed (below).")] if failed else []

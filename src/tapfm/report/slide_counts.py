"""Tables with the number of slides by split, label and origin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tapfm.cohort.cohort_table import read_cohort
from tapfm.cohort.splits import SPLITS, TRAIN, VALIDATION
from tapfm.errors import TapfmError
from tapfm.evaluation.predictions import Prediction
from tapfm.report.content import Block
from tapfm.report.reported_run import ReportedRun
from tapfm.report.slide_set_results import SlideSetResults
from tapfm.results.document import Paragraph
from tapfm.results.table import Column, Row, Table, table_row
from tapfm.runtime.messages import format_count
from tapfm.tasks.labels import label_count_cells, label_count_columns
from tapfm.tasks.target import TargetKinds

# columns of a cohort table that describe the origin of a slide
_ORIGIN_COLUMNS = {
    *("site", "centre", "center", "hospital"),
    *("scanner", "vendor", "objective", "magnification", "mpp", "stain"),
}
_MAX_VALUES = 6  # listed for each column and split
_SPLIT_TITLES = {TRAIN: "training", VALIDATION: "validation"}


def build_slide_count_blocks(run: ReportedRun, results: Sequence[SlideSetResults]) -> list[Block]:
    """Return the number of slides, patients and labels in each split and in each external cohort."""
    targets = run.kinds
    splits = [split for split in SPLITS if run.slides_of_split(split)]
    rows = [_count_split(_format_split(split), run.slides_of_split(split), targets) for split in splits]
    own_slides = {row.get("slide_id") for row in run.slides}
    for result in results:
        if not result.own_cohort or not {each.slide_id for each in result.predictions} <= own_slides:
            rows.append(_count_predictions(result.title, result.predictions, targets))
    columns = [
        Column("", text=True),
        Column("patients"),
        Column("slides"),
        Column("tiles"),
        *label_count_columns(targets),
    ]
    blocks: list[Block] = [Table(columns, rows)]
    origins = _count_origins(run)
    if origins:
        columns = [Column("", text=True), *(Column(name, text=True) for name in origins)]
        origin_rows = [
            table_row(_format_split(split), *(counts[split] for counts in origins.values())) for split in splits
        ]
        blocks.append(Table(columns, origin_rows, "Origin of the slides"))
    return [*blocks, *_describe_failed(run)]


def _format_split(split: str) -> str:
    return _SPLIT_TITLES.get(split, split)


def _count_split(title: str, rows: Sequence[Mapping[str, str]], targets: TargetKinds) -> Row:
    patients = len({(row.get("cohort"), row.get("patient_id")) for row in rows})
    tiles = sum(int(row["tiles"]) for row in rows if row.get("tiles"))
    return table_row(title, patients, len(rows), tiles or None, *label_count_cells(rows, targets))


def _count_predictions(title: str, predictions: Sequence[Prediction], targets: TargetKinds) -> Row:
    patients = len({(each.cohort, each.patient_id) for each in predictions})
    counts = [
        kind.label_count_cell([each.labels.get(target) for each in predictions]) for target, kind in targets.items()
    ]
    return table_row(title, patients, len(predictions), sum(each.tiles for each in predictions) or None, *counts)


def _count_origins(run: ReportedRun) -> dict[str, dict[str, str]]:
    """Return the counts of cohorts, sites, scanners etc. by column and split.

    All columns except `cohort` are read from the cohort table; they are missing if it no longer exists.
    """
    table = Path(str(run.settings.get("cohort", {}).get("table", "")))
    values_by_column: dict[str, dict[str, str]] = {}  # column -> slide -> value
    if any(row.get("cohort") for row in run.slides):
        values_by_column["cohort"] = {row["slide_id"]: row["cohort"] for row in run.slides}
    if table.is_file():
        try:
            rows = read_cohort(table).rows
        except TapfmError:  # changed since the run; the report does not need it
            rows = ()
        for row in rows:
            values = {"mpp": "" if row.mpp is None else f"{row.mpp:g}"} | dict(row.labels)
            for name, value in values.items():
                if name.lower() in _ORIGIN_COLUMNS:
                    values_by_column.setdefault(name, {})[row.slide_id] = value
    return {
        name: {
            split: _format_counts(values.get(row["slide_id"], "") for row in run.slides_of_split(split))
            for split in SPLITS
        }
        for name, values in values_by_column.items()
        if any(values.values())
    }


def _format_counts(values: Iterable[str]) -> str:
    """Return the number of slides with each value, such as "alpha 6, bravo 4"."""
    counts = Counter(value or "unknown" for value in values)
    if len(counts) > _MAX_VALUES:
        most_common = counts.most_common(_MAX_VALUES - 1)
        others = len(counts) - len(most_common)
        return ", ".join(f"{name} {count:,}" for name, count in most_common) + f", and {others:,} other values"
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


def _describe_failed(run: ReportedRun) -> list[Block]:
    failed = sum(row.get("problem") == "failed" for row in run.failures)
    return [Paragraph(f"{format_count(failed, 'slide')} failed during training (see Failures).")] if failed else []

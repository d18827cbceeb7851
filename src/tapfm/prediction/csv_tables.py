"""predictions.csv and failures.csv of a prediction folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapfm.evaluation.predictions import COLUMNS
from tapfm.prediction.folder import PREDICTIONS_CSV, PredictedSlide
from tapfm.runtime.cohort_job import FAILURES_FILE, Failure
from tapfm.runtime.csv_files import read_csv_or_empty, write_csv

_FAILURE_COLUMNS = ("slide_id", "problem", "reason", "hint")
_SKIPPED = "tiles skipped"


def write_predictions_table(folder: Path, slides: Sequence[PredictedSlide]) -> None:
    """Write predictions.csv: one row per slide and target. The first columns are those of a run's predictions."""
    rows = []
    for slide in slides:
        for target, prediction in slide.targets.items():
            ids = [slide.patient_id, slide.slide_id, slide.cohort or "", slide.split or "", target]
            kind = slide.kinds[target]
            values = [*kind.format_prediction(prediction.label, prediction.logit), slide.tiles, slide.tiles_failed]
            threshold = None if prediction.threshold is None else repr(prediction.threshold)
            call = [threshold, kind.format_label(prediction.call), slide.warning]
            rows.append([*ids, *values, *call, f"{slide.seconds:.2f}", repr(slide.mpp), slide.mpp_source or ""])
    columns = [*COLUMNS, "threshold", "call", "warning", "seconds", "mpp", "mpp_source"]
    write_csv(folder / PREDICTIONS_CSV, columns, rows)


def write_failures(folder: Path, failed: Mapping[str, Failure], slides: Sequence[PredictedSlide]) -> None:
    """Write failures.csv: slides that failed, and slides with unreadable tiles."""
    rows: list[list[Any]] = [[slide_id, each.stage, each.reason, each.hint] for slide_id, each in failed.items()]
    for slide in slides:
        if slide.tiles_failed and slide.slide_id not in failed:
            reason = f"{slide.tiles_failed:,} of {slide.tiles + slide.tiles_failed:,} tiles cannot be read"
            rows.append([slide.slide_id, _SKIPPED, reason, ""])
    write_csv(folder / FAILURES_FILE, _FAILURE_COLUMNS, rows)


def read_failures(folder: Path) -> dict[str, Failure]:
    """Return the failures of an earlier command, or an empty dictionary if the table cannot be read."""
    return {
        row["slide_id"]: Failure(row["reason"], row["hint"], stage=row["problem"])
        for row in read_csv_or_empty(folder / FAILURES_FILE, *_FAILURE_COLUMNS)
        if row["problem"] != _SKIPPED
    }

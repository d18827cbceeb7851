"""predictions.csv and failures.csv of a folder of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapfm.evaluation.predictions import COLUMNS
from tapfm.prediction.folder import TABLE, PredictedSlide
from tapfm.runtime.cohort_job import FAILURES, Failure
from tapfm.runtime.csv_files import recall_csv, write_csv

_FAILURE_COLUMNS = ("slide_id", "what", "reason", "what_to_do")
_SKIPPED = "tiles skipped"


def write_predictions_table(folder: Path, slides: Sequence[PredictedSlide]) -> None:
    """Write predictions.csv: a line per slide and target, with the columns of every table of predictions first."""
    rows = []
    for slide in slides:
        for target, said in slide.targets.items():
            about = [slide.patient_id, slide.slide_id, slide.cohort or "", slide.split or "", target]
            kind = slide.kinds[target]
            numbers = [*kind.format_prediction(said.label, said.logit), slide.tiles, slide.tiles_failed]
            threshold = None if said.threshold is None else repr(said.threshold)
            rows.append([*about, *numbers, threshold, kind.format_label(said.call), f"{slide.seconds:.2f}"])
    write_csv(folder / TABLE, [*COLUMNS, "threshold", "call", "seconds"], rows)


def write_failures(folder: Path, failed: Mapping[str, Failure], slides: Sequence[PredictedSlide]) -> None:
    """Write failures.csv: slides that failed, and slides that lack some tiles."""
    rows: list[list[Any]] = [[slide_id, each.stage, each.reason, each.what_to_do] for slide_id, each in failed.items()]
    for slide in slides:
        if slide.tiles_failed and slide.slide_id not in failed:
            reason = f"{slide.tiles_failed:,} of {slide.tiles + slide.tiles_failed:,} tiles cannot be read"
            rows.append([slide.slide_id, _SKIPPED, reason, ""])
    write_csv(folder / FAILURES, _FAILURE_COLUMNS, rows)


def read_failures(folder: Path) -> dict[str, Failure]:
    """Return the slides that failed before; nothing where the table cannot be read."""
    return {
        row["slide_id"]: Failure(row["reason"], row["what_to_do"], stage=row["what"])
        for row in recall_csv(folder / FAILURES, *_FAILURE_COLUMNS)
        if row["what"] != _SKIPPED
    }

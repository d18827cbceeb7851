"""predictions.csv and failures.csv of a folder of predictions."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfm.evaluation.predictions import COLUMNS
from tapfm.prediction.folder import PredictedSlide

FAILURES = ("slide_id", "what", "reason", "what_to_do")
SKIPPED = "tiles skipped"


@dataclass(frozen=True)
class Failed:
    """A slide that came to nothing, or whose pictures did: at what, why, and what to do."""

    what: str  # tiles, read, predict or draw
    reason: str
    what_to_do: str


def predictions_csv(slides: Sequence[PredictedSlide]) -> bytes:
    """Write a line for each slide and target: the columns of every table of predictions, then calls and seconds."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, "threshold", "call", "seconds"])
    for slide in slides:
        for target, said in slide.targets.items():
            about = [slide.patient_id, slide.slide_id, slide.cohort or "", slide.split or "", target]
            numbers = [said.label, repr(said.probability), repr(said.logit), slide.tiles, slide.tiles_failed]
            called = [None if said.threshold is None else repr(said.threshold), said.call, f"{slide.seconds:.2f}"]
            writer.writerow([*about, *("" if each is None else each for each in (*numbers, *called))])
    return text.getvalue().encode()


def failures_csv(failed: Mapping[str, Failed], slides: Sequence[PredictedSlide]) -> bytes:
    """List slides that failed, and slides that lack some tiles."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FAILURES)
    for slide_id, each in failed.items():
        writer.writerow([slide_id, each.what, *(" ".join(words.split()) for words in (each.reason, each.what_to_do))])
    for slide in slides:
        if slide.tiles_failed and slide.slide_id not in failed:
            reason = f"{slide.tiles_failed:,} of {slide.tiles + slide.tiles_failed:,} tiles cannot be read"
            writer.writerow([slide.slide_id, SKIPPED, reason, ""])
    return text.getvalue().encode()


def read_failures(folder: Path) -> dict[str, Failed]:
    """Recall the slides that failed before; nothing where there is no such table."""
    try:
        with (folder / "failures.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return {
            row["slide_id"]: Failed(*(row[name] for name in FAILURES[1:])) for row in rows if row["what"] != SKIPPED
        }
    except (OSError, LookupError, ValueError, csv.Error):
        return {}

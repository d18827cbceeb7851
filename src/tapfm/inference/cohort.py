"""Predict a cohort slide by slide; finished slides are saved, so that a stopped command can resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tapfm.encoders.features import FEATURES_VERSION
from tapfm.evaluation.predictions import LabelledSlide, Prediction
from tapfm.inference.bags import Bags, SlideFailed
from tapfm.inference.predictor import EncodedSlide, Predictor
from tapfm.runtime.files import raise_if_disk_full
from tapfm.runtime.progress import SlideProgress
from tapfm.tiles.reading import SkippedTiles


@dataclass(frozen=True)
class CohortPredictions:
    """Predictions in the order of the slides, failed slides with the reason, and slides with unreadable tiles."""

    predictions: list[Prediction]
    failed: dict[str, str]
    skipped: dict[str, SkippedTiles]


class FinishedSlide(NamedTuple):
    """The saved prediction of a slide."""

    logits: list[float]  # in the order of the targets
    tiles: int
    unreadable_tiles: list[int]  # rows of unreadable tiles
    reason: str  # of the first unreadable tile


class FinishedSlides:
    """A file with one line per finished slide.

    A line is valid for one model, one `FEATURES_VERSION` and, if `digests` has the slide, one digest of its inputs
    (tiles and slide files, or stored features).
    """

    def __init__(self, path: Path, model_digest: str, digests: Mapping[str, str] | None = None) -> None:
        self._path, self._digests = path, digests or {}
        self._model = f"{model_digest} {FEATURES_VERSION}"

    def read(self) -> dict[str, FinishedSlide]:
        """Return the finished slides; a truncated line is ignored."""
        finished = {}
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        for line in lines:
            try:
                key, slide_id, *values = json.loads(line)
                if key == self._line_key(slide_id):
                    finished[slide_id] = FinishedSlide(*values)
            except (ValueError, TypeError):
                continue
        return finished

    def add(self, slide_id: str, slide: FinishedSlide) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                # starts with a line break: the line before may be truncated
                file.write("\n" + json.dumps([self._line_key(slide_id), slide_id, *slide]))
        except OSError as error:
            raise_if_disk_full(error, self._path)
            raise

    def _line_key(self, slide_id: str) -> str:
        """Return what a valid line of the slide starts with: model, version and, if known, digest of its inputs."""
        return f"{self._model} {self._digests[slide_id]}" if slide_id in self._digests else self._model


def predict_cohort(
    predictor: Predictor,
    bags: Bags,
    slides: Sequence[LabelledSlide],
    finished: FinishedSlides,
    *,
    on_slide: Callable[[str, EncodedSlide | SlideFailed], object] = lambda *_: None,
    stop_signal: Callable[[], int | None] = lambda: None,
) -> CohortPredictions:
    """Predict slides on all of their tiles; finished slides are not read again. Raises Interrupted."""
    known = finished.read()

    def predict_and_save(slide_id: str, slide: EncodedSlide) -> None:
        logits = list(predictor.predict_logits(slide_id, slide).values())
        known[slide_id] = FinishedSlide(logits, slide.tiles, slide.skipped.tiles, slide.skipped.reason)
        finished.add(slide_id, known[slide_id])

    remaining = [slide.slide_id for slide in slides if slide.slide_id not in known]
    failed = predictor.run(remaining, bags, predict_and_save, on_slide=on_slide, stop_signal=stop_signal)
    return collect_predictions(
        slides, predictor.targets, known, {slide_id: failure.reason for slide_id, failure in failed.items()}
    )


def collect_predictions(
    slides: Sequence[LabelledSlide],
    targets: Iterable[str],
    finished: Mapping[str, FinishedSlide],
    failed: dict[str, str],
) -> CohortPredictions:
    """Combine finished slides with their labels and patients, in the order of the cohort."""
    known = [(slide, finished[slide.slide_id]) for slide in slides if slide.slide_id in finished]
    return CohortPredictions(
        [slide.prediction(targets, each.logits, each.tiles, len(each.unreadable_tiles)) for slide, each in known],
        failed,
        {
            slide.slide_id: SkippedTiles(each.unreadable_tiles, each.reason)
            for slide, each in known
            if each.unreadable_tiles
        },
    )


def count_slide(progress: SlideProgress, slide_id: str, result: EncodedSlide | SlideFailed) -> None:
    """Count a slide on a progress bar, and report it there if it failed."""
    if isinstance(result, SlideFailed):
        progress.finish_slide(slide_id, failure=result.reason)
    else:
        progress.finish_slide(slide_id, tiles=result.tiles)

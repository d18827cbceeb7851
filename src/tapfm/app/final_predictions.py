"""The final figures of a run: the best epoch's model on all tiles of each slide; what is done is remembered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tapfm.adaptation.bags import Bags, SlideFailed, Visit
from tapfm.adaptation.learner import Learner
from tapfm.adaptation.trainer import Interrupted, LabelledSlide, predict, prediction_of
from tapfm.evaluation.predictions import Prediction


def predict_slides(
    learner: Learner,
    bags: Bags,
    slides: Sequence[LabelledSlide],
    remembered: Remembered,
    *,
    said: Callable[[int], object],
    asked_to_stop: Callable[[], int | None],
) -> tuple[list[Prediction], dict[str, str]]:
    """Predict slides on all of their tiles; gives the predictions, in the order of the slides, and what failed."""
    targets = learner.model.task.targets
    known = remembered.read()
    todo = [slide for slide in slides if slide.slide_id not in known]
    done = {
        slide.slide_id: prediction_of(slide, targets, *known[slide.slide_id])
        for slide in slides
        if slide.slide_id in known
    }
    failed: dict[str, str] = {}
    learner.model.train(False)
    bags.begin(visits(todo))
    try:
        for slide in todo:
            try:
                bag = bags.encoded_bag(visit(slide), learner.model)
            except SlideFailed as failure:
                failed[slide.slide_id] = str(failure)
            else:
                done[slide.slide_id] = predict(learner, slide, bag)
                remembered.add(done[slide.slide_id])
            said(done[slide.slide_id].tiles if slide.slide_id in done else 0)
            if (number := asked_to_stop()) is not None:
                raise Interrupted(number)
    finally:
        bags.close()
    return [done[slide.slide_id] for slide in slides if slide.slide_id in done], failed


def visits(slides: Sequence[LabelledSlide]) -> Iterator[Visit]:
    """Plan to look at all tiles of each slide."""
    return (visit(slide) for slide in slides)


def visit(slide: LabelledSlide) -> Visit:
    """Look at all tiles."""
    return Visit("look", slide.slide_id, None, ())


class Remembered:
    """Predictions of slides that are done, a line each, for as long as the model is the same."""

    def __init__(self, path: Path, model: str) -> None:
        self._path, self._model = path, model

    def read(self) -> dict[str, tuple[list[float], int, int]]:
        """Recall logits, tiles and missing tiles; a line that was cut off does not count."""
        known = {}
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        for line in lines:
            try:
                model, slide_id, logits, tiles, tiles_failed = json.loads(line)
            except ValueError:
                continue
            if model == self._model:
                known[slide_id] = logits, tiles, tiles_failed
        return known

    def add(self, prediction: Prediction) -> None:
        """Remember one more."""
        logits = list(prediction.logits.values())
        line = [self._model, prediction.slide_id, logits, prediction.tiles, prediction.tiles_failed]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(line))  # a line before that was cut off stays alone

"""The final figures of a run: the best epoch's model on all tiles of each slide; what is done is remembered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tapfm.adaptation.bags import Bag, Bags, Encodes, SlideFailed, Visit, refuse_too_many_missing
from tapfm.adaptation.learner import Learner
from tapfm.adaptation.progress import SkippedTiles
from tapfm.adaptation.trainer import Interrupted, LabelledSlide, predict, prediction_of
from tapfm.evaluation.predictions import Prediction
from tapfm.storage import refuse_full_disk


@dataclass(frozen=True)
class Final:
    """What was predicted, what failed, and how many tiles of which slides were skipped."""

    predictions: list[Prediction]
    failed: dict[str, str]
    skipped: dict[str, SkippedTiles]


def predict_slides(
    learner: Learner,
    bags: Bags,
    slides: Sequence[LabelledSlide],
    remembered: Remembered,
    *,
    said: Callable[[int], object],
    asked_to_stop: Callable[[], int | None],
) -> Final:
    """Predict slides on all of their tiles, in the order of the slides."""
    targets = learner.model.task.targets
    known = remembered.read()
    todo = [slide for slide in slides if slide.slide_id not in known]
    failed: dict[str, str] = {}
    learner.model.train(False)
    for slide, bag in bags_in_turn(bags, todo, learner, asked_to_stop):
        if isinstance(bag, SlideFailed):
            failed[slide.slide_id] = str(bag)
            said(0)
        else:
            logits = list(predict(learner, slide, bag).logits.values())
            known[slide.slide_id] = Looked(logits, bag.tiles, sorted(bag.missing), first_reason(bag))
            remembered.add(slide.slide_id, known[slide.slide_id])
            said(bag.tiles)
    return final_of(slides, targets, known, failed)


def bags_in_turn(
    bags: Bags, slides: Sequence[LabelledSlide], model: Encodes, asked_to_stop: Callable[[], int | None]
) -> Iterator[tuple[LabelledSlide, Bag | SlideFailed]]:
    """Give all tiles of each slide, encoded, or why there are none; the next slides are read meanwhile.

    This is how evaluation and whole-slide prediction both come to what a model is asked about.
    """
    bags.begin(visits(slides))
    try:
        for slide in slides:
            try:
                bag = bags.encoded_bag(visit(slide), model)
                refuse_too_many_missing(len(bag.missing), bags.tiles_of(slide.slide_id), first_reason(bag))
            except SlideFailed as failure:
                yield slide, failure
            else:
                yield slide, bag
            if (number := asked_to_stop()) is not None:
                raise Interrupted(number)
    finally:
        bags.close()


def first_reason(bag: Bag) -> str:
    """Say why the first of a slide's missing tiles is missing."""
    return next(iter(bag.missing.values()), "")


def final_of(
    slides: Sequence[LabelledSlide], targets: Sequence[str], known: Mapping[str, Looked], failed: dict[str, str]
) -> Final:
    """Put what is known of each slide together, in the order of the slides."""
    looked = [(slide, known[slide.slide_id]) for slide in slides if slide.slide_id in known]
    return Final(
        [prediction_of(slide, targets, each.logits, each.tiles, len(each.missing)) for slide, each in looked],
        failed,
        {slide.slide_id: SkippedTiles(each.missing, each.reason) for slide, each in looked if each.missing},
    )


def visits(slides: Sequence[LabelledSlide]) -> Iterator[Visit]:
    """Plan to look at all tiles of each slide."""
    return (visit(slide) for slide in slides)


def visit(slide: LabelledSlide) -> Visit:
    """Look at all tiles."""
    return Visit("look", slide.slide_id, None, ())


class Looked(NamedTuple):
    """What is remembered of a slide."""

    logits: list[float]
    tiles: int
    missing: list[int]
    reason: str


class Remembered:
    """Slides that are done, a line each, for as long as the model is the same, and the `contents` that are given."""

    def __init__(self, path: Path, model: str, contents: Mapping[str, str] | None = None) -> None:
        self._path, self._model, self._contents = path, model, contents or {}

    def read(self) -> dict[str, Looked]:
        """Recall them; a line that was cut off does not count."""
        known = {}
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        for line in lines:
            try:
                model, slide_id, *looked = json.loads(line)
                if model == self._key(slide_id):
                    known[slide_id] = Looked(*looked)
            except (ValueError, TypeError):
                continue
        return known

    def add(self, slide_id: str, looked: Looked) -> None:
        """Remember one more."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                # a line before that was cut off stays alone
                file.write("\n" + json.dumps([self._key(slide_id), slide_id, *looked]))
        except OSError as error:
            refuse_full_disk(error, self._path)
            raise

    def _key(self, slide_id: str) -> str:
        return f"{self._model} {self._contents[slide_id]}" if slide_id in self._contents else self._model

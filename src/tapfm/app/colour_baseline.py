"""A baseline that sees no tissue: 21 colour statistics and the number of tiles. What it can do, a shortcut could.

It learns from the run's training slides with a small logistic regression, one for each target, and is scored on the
same slides as the model. A model that is not better may have learnt stain, scanner or the size of a section.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapfm.app.advice import counted
from tapfm.app.evaluated_members import Evaluated
from tapfm.app.evaluation_data import EvaluatedSlides, slides_of_run, with_any_tiles
from tapfm.app.run_data import SlideOfRun
from tapfm.app.slide_colours import Colours
from tapfm.cohort.splits import TRAIN, VALIDATION
from tapfm.encoders.features import read_hdf5, read_tensor
from tapfm.evaluation.logistic import LogisticFit, fit
from tapfm.evaluation.predictions import Prediction

NAME = "colour baseline"


@dataclass(frozen=True)
class BaselineSlides:
    """What the baseline learns from, chooses thresholds on, and is asked about; `why` there is none."""

    training: tuple[SlideOfRun, ...]
    validation: tuple[SlideOfRun, ...]
    evaluated: tuple[SlideOfRun, ...]
    why: str = ""

    @property
    def all(self) -> list[SlideOfRun]:
        """All slides, each once."""
        return list({each.row.slide_id: each for each in (*self.training, *self.validation, *self.evaluated)}.values())


@dataclass(frozen=True)
class Baseline:
    """Its predictions, and what is to be said of it."""

    predictions: tuple[Prediction, ...]
    validation: tuple[Prediction, ...]
    said: str


def baseline_slides(evaluated: Evaluated, data: EvaluatedSlides) -> BaselineSlides:
    """Find the training slides of all members; of folds, those that any of them learnt from."""
    found: dict[str, SlideOfRun] = {}
    for member in evaluated.members:
        for slide in slides_of_run(member):
            if slide.row.slide_id not in found or slide.split == TRAIN:
                found[slide.row.slide_id] = slide
    asked = tuple(with_any_tiles(slide, data.tiles, None) for slide in data.slides)
    training = tuple(slide for slide in found.values() if slide.split == TRAIN)
    validation = tuple(slide for slide in found.values() if slide.split == VALIDATION)
    if not any(member.config is not None for member in evaluated.members):
        return BaselineSlides((), (), asked, "an export does not name the slides it learnt from; evaluate the run")
    if not training:
        return BaselineSlides((), (), asked, "the cohort of the run is not where it was")
    return BaselineSlides(training, validation, asked)


def colours_can_be_read(slides: BaselineSlides) -> bool:
    """Say whether there are pixels to take colours of, on both sides."""
    return all(
        any(each.tiles is not None and each.row.path.exists() for each in side)
        for side in (slides.training, slides.evaluated)
    )


def make_baseline(slides: BaselineSlides, targets: Sequence[str], colours: Colours | None) -> Baseline:
    """Fit on the training slides and score the others; without colours by the number of tiles alone."""
    if slides.why:
        return Baseline((), (), f"There is no {NAME}: {slides.why}.")
    numbers = {slide.row.slide_id: known for slide in slides.all if (known := numbers_of(slide, colours)) is not None}
    training = [slide for slide in slides.training if slide.row.slide_id in numbers]
    fits = {target: each for target in targets if (each := fitted(training, target, numbers)) is not None}
    if len(fits) < len(targets):
        lacking = ", ".join(target for target in targets if target not in fits)
        return Baseline((), (), f"There is no {NAME}: too few training slides could be read for {lacking}.")
    asked = [slide for slide in slides.evaluated if slide.row.slide_id in numbers]
    held_out = [slide for slide in slides.validation if slide.row.slide_id in numbers]
    what = "the number of tiles alone, as there are no pixels to read" if colours is None else "colours and tile count"
    said = f"The {NAME} knows {what}; it learnt from {counted(len(training), 'training slide')}."
    if lost := len(slides.evaluated) - len(asked):
        said += f" {counted(lost, 'slide')} could not be read for it."
    return Baseline(tuple(scored(asked, fits, numbers)), tuple(scored(held_out, fits, numbers)), said)


def numbers_of(slide: SlideOfRun, colours: Colours | None) -> list[float] | None:
    """Give what the baseline knows of a slide, or None where that cannot be read."""
    if (count := tiles_of(slide)) == 0:
        return None
    if colours is None:
        return [math.log(count)]
    statistics = colours.get(slide.row.slide_id)
    return None if statistics is None else [*statistics, math.log(count)]


def tiles_of(slide: SlideOfRun) -> int:
    """Count the tiles of a slide, by its tiles or by its features."""
    if slide.tiles is not None:
        return len(slide.tiles)
    if slide.features is None:
        return 0
    path = slide.features.path
    stored = (read_tensor if path.suffix == ".pt" else read_hdf5)(path, only_look=True)
    return int(stored.features.shape[-2])


def fitted(slides: Sequence[SlideOfRun], target: str, numbers: Mapping[str, Sequence[float]]) -> LogisticFit | None:
    """Fit one target, if both classes are there."""
    known = [slide for slide in slides if slide.labels[target] is not None]
    labels = [int(slide.labels[target] or 0) for slide in known]
    if len(set(labels)) < 2:
        return None
    return fit([list(numbers[slide.row.slide_id]) for slide in known], labels)


def scored(
    slides: Sequence[SlideOfRun], fits: Mapping[str, LogisticFit], numbers: Mapping[str, Sequence[float]]
) -> list[Prediction]:
    """Predict slides as a model does."""
    return [
        Prediction(
            slide_id=slide.row.slide_id,
            patient_id=slide.row.patient_id,
            split=slide.split,
            cohort=slide.row.cohort,
            labels=slide.labels,
            logits={target: logit_of(each, numbers[slide.row.slide_id]) for target, each in fits.items()},
            tiles=tiles_of(slide),
        )
        for slide in slides
    ]


def logit_of(fitted_to: LogisticFit, numbers: Sequence[float]) -> float:
    """Score one slide."""
    return float(fitted_to.logits([list(numbers)])[0])

"""A baseline that sees no tissue: 21 colour statistics and the number of tiles. What it can do, a shortcut could.

It learns from the run's training slides with a small linear model, one for each target (of a binary target a logistic
regression), and is scored on the same slides as the model. A model that is not better may have learnt stain, scanner or
the size of a section.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapfm.baselines.slide_colours import Colours, colours_key
from tapfm.cohort.splits import TRAIN, VALIDATION
from tapfm.encoders.features import read_hdf5, read_tensor
from tapfm.evaluation.predictions import Prediction
from tapfm.evaluation.results import BaselinePredictions
from tapfm.runs.data import RunSlide
from tapfm.runs.evaluation_data import EvaluatedSlides, slides_of_run, with_any_tiles
from tapfm.runs.model_folder import ModelFolder
from tapfm.runtime.messages import counted
from tapfm.tasks.target import BASELINE, LinearFit, TargetKinds

_SlideFeatures = tuple[RunSlide, list[float]]  # a slide, and what the baseline knows of it


@dataclass(frozen=True)
class BaselineSlides:
    """What the baseline learns from, chooses thresholds on, and is asked about; `why` there is none."""

    training: tuple[RunSlide, ...]
    validation: tuple[RunSlide, ...]
    evaluated: tuple[RunSlide, ...]
    why: str = ""

    @property
    def all(self) -> list[RunSlide]:
        """All slides; another cohort may have slide_ids of the training slides for slides of its own."""
        return [*self.training, *self.validation, *self.evaluated]


def baseline_slides(evaluated: ModelFolder, data: EvaluatedSlides) -> BaselineSlides:
    """Find the training slides of all members; of folds, those that any of them learnt from."""
    found: dict[str, RunSlide] = {}
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


def make_baseline(slides: BaselineSlides, targets: TargetKinds, colours: Colours | None) -> BaselinePredictions:
    """Fit on the training slides and score the others; without colours by the number of tiles alone."""
    if slides.why:
        return BaselinePredictions((), (), f"There is no {BASELINE}: {slides.why}.")
    training, held_out, asked = (
        _with_numbers(each, colours) for each in (slides.training, slides.validation, slides.evaluated)
    )
    rows = [numbers for _, numbers in training]
    fits = {
        target: each
        for target, kind in targets.items()
        if (each := kind.fit_linear(rows, [slide.labels[target] for slide, _ in training])) is not None
    }
    if len(fits) < len(targets):
        lacking = ", ".join(target for target in targets if target not in fits)
        return BaselinePredictions(
            (), (), f"There is no {BASELINE}: too few training slides could be read for {lacking}."
        )
    what = "the number of tiles alone, as there are no pixels to read" if colours is None else "colours and tile count"
    said = f"The {BASELINE} knows {what}; it learnt from {counted(len(training), 'training slide')}."
    if lost := len(slides.evaluated) - len(asked):
        said += f" {counted(lost, 'slide')} could not be read for it."
    return BaselinePredictions(tuple(_scored(asked, fits)), tuple(_scored(held_out, fits)), said)


def _with_numbers(slides: Sequence[RunSlide], colours: Colours | None) -> list[_SlideFeatures]:
    """Put what the baseline knows beside each slide; leaves out those that cannot be read."""
    return [(slide, numbers) for slide in slides if (numbers := _numbers_of(slide, colours)) is not None]


def _numbers_of(slide: RunSlide, colours: Colours | None) -> list[float] | None:
    """Give what the baseline knows of a slide, or None where that cannot be read."""
    if (count := _tiles_of(slide)) == 0:
        return None
    if colours is None:
        return [math.log(count)]
    statistics = None if slide.tiles is None else colours.get(colours_key(slide))
    return None if statistics is None else [*statistics, math.log(count)]


def _tiles_of(slide: RunSlide) -> int:
    """Count the tiles of a slide, by its tiles or by its features."""
    if slide.tiles is not None:
        return len(slide.tiles)
    if slide.features is None:
        return 0
    path = slide.features.path
    stored = (read_tensor if path.suffix == ".pt" else read_hdf5)(path, only_look=True)
    return int(stored.features.shape[-2])


def _scored(known: Sequence[_SlideFeatures], fits: Mapping[str, LinearFit]) -> list[Prediction]:
    """Predict slides as a model does."""
    return [
        Prediction(
            slide_id=slide.row.slide_id,
            patient_id=slide.row.patient_id,
            split=slide.split,
            cohort=slide.row.cohort,
            labels=slide.labels,
            logits={target: _logit_of(each, numbers) for target, each in fits.items()},
            tiles=_tiles_of(slide),
        )
        for slide, numbers in known
    ]


def _logit_of(fitted_to: LinearFit, numbers: Sequence[float]) -> float:
    """Score one slide."""
    return float(fitted_to.logits([list(numbers)])[0])

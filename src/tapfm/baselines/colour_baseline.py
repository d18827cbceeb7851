"""A baseline without tissue morphology: 21 colour statistics and the number of tiles of a slide.

One linear model per target (logistic regression for a binary target) is fitted to the training slides of the run and
evaluated on the same slides as the model. A model that is not better than this baseline may rely on a shortcut: stain,
scanner, or the size of the section.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapfm.baselines.slide_colours import Colours, colours_key
from tapfm.cohort.splits import TRAIN, VALIDATION
from tapfm.encoders.features import read_hdf5, read_pt
from tapfm.evaluation.model_evaluation import BaselinePredictions
from tapfm.evaluation.predictions import Prediction
from tapfm.runs.data import RunSlide
from tapfm.runs.evaluation_data import EvaluationSlides, attach_inputs, read_run_slides
from tapfm.runs.model_folder import ModelFolder
from tapfm.runtime.messages import format_count
from tapfm.tasks.target import BASELINE, LinearFit, TargetKinds

_SlideStatistics = tuple[RunSlide, list[float]]  # a slide and its statistics for the baseline


@dataclass(frozen=True)
class BaselineSlides:
    """Slides for fitting the baseline, choosing thresholds and evaluating, or the reason why it is unavailable."""

    training: tuple[RunSlide, ...]
    validation: tuple[RunSlide, ...]
    evaluated: tuple[RunSlide, ...]
    unavailable_reason: str = ""

    @property
    def all(self) -> list[RunSlide]:
        """All slides. A slide id occurs twice if an evaluated slide was used for training or validation, or if an
        external cohort uses the same id."""
        return [*self.training, *self.validation, *self.evaluated]


def find_baseline_slides(model_folder: ModelFolder, data: EvaluationSlides) -> BaselineSlides:
    """Return the slides of the baseline. For an ensemble, the training slides are those of all of its members."""
    run_slides: dict[str, RunSlide] = {}
    for member in model_folder.members:
        for slide in read_run_slides(member):
            if slide.row.slide_id not in run_slides or slide.split == TRAIN:
                run_slides[slide.row.slide_id] = slide
    evaluated = tuple(attach_inputs(slide, data.tiles_folder, None) for slide in data.slides)
    training = tuple(slide for slide in run_slides.values() if slide.split == TRAIN)
    validation = tuple(slide for slide in run_slides.values() if slide.split == VALIDATION)
    if not any(member.config is not None for member in model_folder.members):
        reason = "an export does not contain its training slides; evaluate the run instead"
        return BaselineSlides((), (), evaluated, reason)
    if not training:
        reason = "the cohort table of the run cannot be read, or no longer contains the training slides"
        return BaselineSlides((), (), evaluated, reason)
    return BaselineSlides(training, validation, evaluated)


def can_read_colours(slides: BaselineSlides) -> bool:
    """Return whether at least one training slide and at least one evaluated slide have tiles and a slide file."""
    return all(
        any(each.tiles is not None and each.row.path.exists() for each in group)
        for group in (slides.training, slides.evaluated)
    )


def predict_baseline(slides: BaselineSlides, targets: TargetKinds, colours: Colours | None) -> BaselinePredictions:
    """Fit the baseline and predict the evaluated slides. If `colours` is None, it uses only the number of tiles."""
    if slides.unavailable_reason:
        return BaselinePredictions((), (), f"The {BASELINE} is not available: {slides.unavailable_reason}.")
    training, validation, evaluated = (
        _add_statistics(each, colours) for each in (slides.training, slides.validation, slides.evaluated)
    )
    rows = [statistics for _, statistics in training]
    fits = {
        target: each
        for target, kind in targets.items()
        if (each := kind.fit_linear(rows, [slide.labels[target] for slide, _ in training])) is not None
    }
    if len(fits) < len(targets):
        missing = ", ".join(target for target in targets if target not in fits)
        return BaselinePredictions(
            (),
            (),
            f"The {BASELINE} is not available: the readable training slides do not have both classes of {missing}.",
        )
    inputs = "colours and tile count"
    if colours is None:
        inputs = "only the number of tiles; colours need tiles and slide files of training and evaluated slides"
    note = f"The {BASELINE} uses {inputs}. It was fitted to {format_count(len(training), 'training slide')}."
    if unreadable := len(slides.evaluated) - len(evaluated):
        note += f" It excludes {format_count(unreadable, 'slide')} without readable tiles."
    return BaselinePredictions(tuple(_predict_slides(evaluated, fits)), tuple(_predict_slides(validation, fits)), note)


def _add_statistics(slides: Sequence[RunSlide], colours: Colours | None) -> list[_SlideStatistics]:
    """Return slides with their statistics for the baseline, without unreadable slides."""
    return [
        (slide, statistics)
        for slide in slides
        if (statistics := _compute_baseline_statistics(slide, colours)) is not None
    ]


def _compute_baseline_statistics(slide: RunSlide, colours: Colours | None) -> list[float] | None:
    """Return the log of the tile count of a slide, after its colour statistics if `colours` is given.

    None if the slide has no tiles or no entry in `colours`.
    """
    if (count := _count_tiles(slide)) == 0:
        return None
    if colours is None:
        return [math.log(count)]
    statistics = None if slide.tiles is None else colours.get(colours_key(slide))
    return None if statistics is None else [*statistics, math.log(count)]


def _count_tiles(slide: RunSlide) -> int:
    """Return the number of tiles of a slide, from its tiles or its features."""
    if slide.tiles is not None:
        return len(slide.tiles)
    if slide.features is None:
        return 0
    path = slide.features.path
    stored = (read_pt if path.suffix == ".pt" else read_hdf5)(path, metadata_only=True)
    return int(stored.features.shape[-2])


def _predict_slides(slides: Sequence[_SlideStatistics], fits: Mapping[str, LinearFit]) -> list[Prediction]:
    return [
        Prediction(
            slide_id=slide.row.slide_id,
            patient_id=slide.row.patient_id,
            split=slide.split,
            cohort=slide.row.cohort,
            labels=slide.labels,
            logits={target: _predict_logit(each, statistics) for target, each in fits.items()},
            tiles=_count_tiles(slide),
        )
        for slide, statistics in slides
    ]


def _predict_logit(fit: LinearFit, statistics: Sequence[float]) -> float:
    return float(fit.logits([list(statistics)])[0])

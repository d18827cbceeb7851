"""Predictions of a run or an export on all tiles of slides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from tapfm.evaluation.predictions import LabelledSlide
from tapfm.inference.cohort import (
    CohortPredictions,
    FinishedSlide,
    FinishedSlides,
    collect_predictions,
    count_slide,
    predict_cohort,
)
from tapfm.inference.loading import load_for_features, load_with_encoder, prepare_model
from tapfm.inference.predictor import Predictor
from tapfm.inference.slide_bags import make_bags
from tapfm.runs.data import list_labelled_slides
from tapfm.runs.evaluation_data import EvaluationSlides
from tapfm.runs.model_folder import ModelMember
from tapfm.runtime.devices import choose_device
from tapfm.runtime.progress import SlideProgress


def predict_member(
    member: ModelMember,
    data: EvaluationSlides,
    finished_path: Path,
    *,
    device: str,
    workers: int,
    description: str,
    console: Console,
    stop_signal: Callable[[], int | None],
) -> CohortPredictions:
    """Predict slides with a run or an export, and save finished slides in `finished_path`.

    Slides that were predicted before with the same weights and tiles are not read again.
    """
    slides = list_labelled_slides(data.slides)
    finished = FinishedSlides(finished_path, member.weights_digest, data.input_digests())
    known = finished.read()
    for slide_id, slide in _find_run_predictions(member, data, slides).items():
        if slide_id not in known:
            finished.add(slide_id, slide)
            known[slide_id] = slide
    remaining = [slide for slide in data.slides if slide.row.slide_id not in known]
    if not remaining:
        return collect_predictions(slides, member.targets, known, {})
    chosen_device = choose_device(device)
    if data.features_folder is not None:
        model = load_for_features(member, data.slides, chosen_device)
    else:
        tiles = sum(len(slide.tiles) for slide in remaining if slide.tiles is not None)
        model = prepare_model(member, load_with_encoder(member, chosen_device), tiles=tiles)
    predictor = Predictor([model], on_retry=console.print)
    bags = make_bags(remaining, tile_px=predictor.tile_px, device=chosen_device, workers=workers)
    with SlideProgress(console, description, slides=len(remaining)) as progress:
        return predict_cohort(
            predictor, bags, slides, finished, on_slide=partial(count_slide, progress), stop_signal=stop_signal
        )


def _find_run_predictions(
    member: ModelMember, data: EvaluationSlides, slides: Sequence[LabelledSlide]
) -> dict[str, FinishedSlide]:
    """Return the slides that the run predicted with the weights of its best epoch.

    Their tiles or features have not changed since then; otherwise an error was raised before.
    """
    if not data.is_run_cohort or member.adapted != (data.features_folder is None):
        return {}
    known: dict[str, FinishedSlide] = {}
    for split in {slide.split for slide in slides}:
        known |= FinishedSlides(member.folder / f".predictions-{split}.jsonl", member.weights_digest).read()
    wanted = {slide.slide_id for slide in slides} & {row["slide_id"] for row in member.read_split_rows()}
    return {slide_id: slide for slide_id, slide in known.items() if slide_id in wanted}

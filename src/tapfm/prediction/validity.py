"""Recognise predictions of an earlier command that are still valid."""

from __future__ import annotations

from dataclasses import replace

from tapfm.encoders.features import FEATURES_VERSION
from tapfm.errors import InputError
from tapfm.prediction.calls import CallThresholds
from tapfm.prediction.folder import SLIDE, PredictedSlide, PredictionFolder
from tapfm.prediction.tile_table import NAME as TILES
from tapfm.runs.data import RunSlide
from tapfm.runs.model_folder import ModelFolder
from tapfm.runtime.files import fingerprint


def prediction_key(evaluated: ModelFolder, slide: RunSlide) -> str:
    """Return the key of a prediction: a digest of weights, tiles and code, then of the slide's files if they exist."""
    weights = [member.digest for member in evaluated.members]
    return fingerprint(weights, slide.content_digest, FEATURES_VERSION)[:16] + (slide.files_digest or "")


def is_predicted(folder: PredictionFolder, slide: RunSlide, key: str, calls: CallThresholds) -> bool:
    """Return whether a slide is predicted with these weights and tiles; its labels, split and path are updated.

    A slide whose files are gone keeps its prediction.
    """
    own = folder.folder_of(slide.row.slide_id)
    if not (own / SLIDE).exists() or not (own / TILES).exists():
        return False
    try:
        before = PredictedSlide.read(own)
    except InputError:
        return False
    if not before.key.startswith(key):
        return False
    said = {
        target: calls.call(target, each.logit, each.constant, slide.labels.get(target))
        for target, each in before.targets.items()
    }
    row = slide.row
    now = replace(
        before,
        patient_id=row.patient_id,
        cohort=row.cohort,
        split=slide.split or None,
        path=row.path.absolute(),
        targets=said,
    )
    if now != before:
        now.write(own)
    return True

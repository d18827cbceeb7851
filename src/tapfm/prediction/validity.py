"""Reuse predictions of an earlier command if they are still valid."""

from __future__ import annotations

from dataclasses import replace

from tapfm.encoders.features import FEATURES_VERSION
from tapfm.errors import InputError
from tapfm.prediction.calls import CallThresholds
from tapfm.prediction.folder import SLIDE_JSON, PredictedSlide, PredictionFolder
from tapfm.prediction.tile_table import TILES_PARQUET
from tapfm.runs.data import RunSlide
from tapfm.runs.model_folder import ModelFolder
from tapfm.runtime.files import fingerprint


def prediction_key(model_folder: ModelFolder, slide: RunSlide) -> str:
    """Return the key of a prediction: a digest of weights, tiles and FEATURES_VERSION, then one of the slide files."""
    weights = [member.weights_digest for member in model_folder.members]
    return fingerprint(weights, slide.tiles_or_features_digest, FEATURES_VERSION)[:16] + (
        slide.slide_files_digest or ""
    )


def reuse_prediction(folder: PredictionFolder, slide: RunSlide, key: str, calls: CallThresholds) -> bool:
    """Return whether a prediction with this key exists. If so, update its labels, split, path and calls.

    The prediction of a slide whose files are missing stays valid.
    """
    slide_folder = folder.slide_folder(slide.row.slide_id)
    if not (slide_folder / SLIDE_JSON).exists() or not (slide_folder / TILES_PARQUET).exists():
        return False
    try:
        before = PredictedSlide.read(slide_folder)
    except InputError:
        return False
    if not before.key.startswith(key):
        return False
    targets = {
        target: calls.predict_target(target, each.logit, each.constant, slide.labels.get(target))
        for target, each in before.targets.items()
    }
    row = slide.row
    now = replace(
        before,
        patient_id=row.patient_id,
        cohort=row.cohort,
        split=slide.split or None,
        path=row.path.absolute(),
        targets=targets,
    )
    if now != before:
        now.write(slide_folder)
    return True

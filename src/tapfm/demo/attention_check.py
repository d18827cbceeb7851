"""Measure how well attention before and after adaptation, and contributions, find the tiles with the planted signal.

The measure is the AUC of tiles with the signal against the other tiles of the same slide. This is possible only for
synthetic slides, for which the ground truth of every tile is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from tapfm.demo.attention_check_image import draw_attention_check
from tapfm.demo.folder import COHORTS, DemoFolder
from tapfm.demo.sizes import ENCODER, TARGET
from tapfm.encoders.features import read_features
from tapfm.metrics.bootstrap import RESAMPLES, percentile_interval
from tapfm.metrics.ranking import auc
from tapfm.prediction.folder import PredictedSlide, PredictionFolder
from tapfm.prediction.tile_table import TileTable
from tapfm.results.estimate import Estimate
from tapfm.runtime.files import write_atomically
from tapfm.runtime.seeding import make_rng
from tapfm.study.folder import StudyFolder
from tapfm.synthetic.truth import SIGNAL_THRESHOLD, read_truth

_SCORES = ("attention_before", "attention_after", "contribution_after")


@dataclass(frozen=True)
class _PositiveSlide:
    """A slide with the signal in some of its tiles, and the scores of all its tiles."""

    slide: PredictedSlide
    tile_table: TileTable
    has_signal: NDArray[np.bool_]  # by tile
    scores: Mapping[str, NDArray[np.float64]]

    def signal_auc(self, score: str) -> float | None:
        """Return the AUC of a score for tiles with the signal against tiles without."""
        return auc(self.has_signal, self.scores[score])


def check_attention(folder: DemoFolder) -> None:
    """Write attention-check.json for both cohorts, and attention-check.png for one slide."""
    slides = {cohort: _read_positive_slides(folder, cohort) for cohort in COHORTS}
    example = _choose_median_slide(slides["external"] or slides["test"])
    if example is not None:
        truth = read_truth(folder.synthetic / "truth", example.slide.slide_id)
        draw_attention_check(folder.attention_check_image, example.slide, example.tile_table, example.scores, truth)
    measured = {cohort: _measure_cohort(cohort, positive) for cohort, positive in slides.items()}
    write_atomically(folder.attention_check, f"{json.dumps(measured, indent=2)}\n".encode())


def _read_positive_slides(folder: DemoFolder, cohort: str) -> list[_PositiveSlide]:
    """Return the slides of a cohort that have tiles with the signal and tiles without."""
    predictions, positive = PredictionFolder(folder.predictions(cohort)), []
    features = StudyFolder(folder.study).features(ENCODER, cohort)
    for slide in predictions.slides():
        truth, tile_table = read_truth(folder.synthetic / "truth", slide.slide_id), predictions.tiles(slide.slide_id)
        has_signal = truth.signal_coverage(TARGET, tile_table.positions, slide.side_px0) >= SIGNAL_THRESHOLD
        if has_signal.any() and not has_signal.all():
            before = _read_attention(features / f"{slide.slide_id}.h5", tile_table)
            after, contribution = tile_table.values["attention"], tile_table.values[f"contribution.{TARGET}"]
            scores = dict(zip(_SCORES, (before, after, contribution), strict=True))
            positive.append(_PositiveSlide(slide, tile_table, has_signal, scores))
    return positive


def _read_attention(features_file: Path, tile_table: TileTable) -> NDArray[np.float64]:
    """Return the raw attention of the pretrained encoder, stored with its features, in the order of the tile table."""
    stored = read_features(features_file)
    assert stored.attention is not None
    assert stored.positions is not None
    index = {(int(x), int(y)): number for number, (x, y) in enumerate(stored.positions)}
    return stored.attention[[index[int(x), int(y)] for x, y in tile_table.positions]].astype(np.float64)


def _measure_cohort(cohort: str, slides: Sequence[_PositiveSlide]) -> dict[str, object]:
    """Return mean AUCs over slides, with confidence intervals from resampled slides (one slide per patient)."""
    mean_auc = dict.fromkeys(_SCORES, asdict(Estimate(None, reason="no positive slide")))
    if slides:
        resampled = make_rng(0, "planted tiles", cohort).integers(len(slides), size=(RESAMPLES, len(slides)))
        for score in _SCORES:
            values = np.array([slide.signal_auc(score) for slide in slides], dtype=np.float64)
            mean_auc[score] = asdict(percentile_interval(float(values.mean()), values[resampled].mean(axis=1)))
    return {
        "slides": len(slides),
        "tiles": sum(len(slide.has_signal) for slide in slides),
        "signal_tile_fraction": fmean(float(slide.has_signal.mean()) for slide in slides) if slides else None,
        "mean_auc": mean_auc,
    }


def _choose_median_slide(slides: Sequence[_PositiveSlide]) -> _PositiveSlide | None:
    """Return the slide with the median AUC of the attention after adaptation."""
    ranked = sorted(slides, key=lambda slide: slide.signal_auc("attention_after") or 0.0)
    return ranked[(len(ranked) - 1) // 2] if ranked else None

"""How well attention finds the tiles with the planted signal, before and after adaptation.

For each positive slide: how often a tile with the signal ranks above one without (AUC). Which tiles have it is known
for painted slides only.
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

_AFTER = "attention after"
_SCORES = ("attention before", _AFTER, "contribution after")


@dataclass(frozen=True)
class _PositiveSlide:
    """A slide with the signal in some of its tiles, and the scores that rank its tiles."""

    slide: PredictedSlide
    table: TileTable
    carries: NDArray[np.bool_]  # tiles with the signal
    scores: Mapping[str, NDArray[np.float64]]

    def rank_auc(self, score: str) -> float | None:
        """Return how often a tile with the signal ranks above one without."""
        return auc(self.carries, self.scores[score])


def check_attention(folder: DemoFolder) -> None:
    """Write planted.json for both cohorts, and draw one slide."""
    slides = {cohort: _read_positive_slides(folder, cohort) for cohort in COHORTS}
    shown = _choose_typical(slides["external"] or slides["test"])
    if shown is not None:
        truth = read_truth(folder.synthetic / "truth", shown.slide.slide_id)
        draw_attention_check(folder.attention_check_image, shown.slide, shown.table, shown.scores, truth)
    measured = {cohort: _measure_cohort(cohort, of_cohort) for cohort, of_cohort in slides.items()}
    write_atomically(folder.attention_check, f"{json.dumps(measured, indent=2)}\n".encode())


def _read_positive_slides(folder: DemoFolder, cohort: str) -> list[_PositiveSlide]:
    """Read the slides of a cohort that have tiles with and without the signal."""
    predictions, found = PredictionFolder(folder.predictions(cohort)), []
    features = StudyFolder(folder.study).features(ENCODER, cohort)
    for slide in predictions.slides():
        truth, table = read_truth(folder.synthetic / "truth", slide.slide_id), predictions.tiles(slide.slide_id)
        carries = truth.signal(TARGET, table.positions, slide.side_px0) >= SIGNAL_THRESHOLD
        if carries.any() and not carries.all():
            before = _read_attention(features / f"{slide.slide_id}.h5", table)
            after, contribution = table.values["attention"], table.values[f"contribution.{TARGET}"]
            scores = dict(zip(_SCORES, (before, after, contribution), strict=True))
            found.append(_PositiveSlide(slide, table, carries, scores))
    return found


def _read_attention(features: Path, table: TileTable) -> NDArray[np.float64]:
    """Return the attention of the pretrained encoder, which is stored with its features, in the order of the table."""
    stored = read_features(features)
    assert stored.attention is not None
    assert stored.positions is not None
    index = {(int(x), int(y)): number for number, (x, y) in enumerate(stored.positions)}
    return stored.attention[[index[int(x), int(y)] for x, y in table.positions]].astype(np.float64)


def _measure_cohort(cohort: str, slides: Sequence[_PositiveSlide]) -> dict[str, object]:
    """Return means over slides, with intervals from resampled slides (a painted patient has one slide)."""
    found = dict.fromkeys(_SCORES, asdict(Estimate(None, reason="no positive slide")))
    if slides:
        drawn = make_rng(0, "planted tiles", cohort).integers(len(slides), size=(RESAMPLES, len(slides)))
        for score in _SCORES:
            values = np.array([slide.rank_auc(score) for slide in slides], dtype=np.float64)
            found[score] = asdict(percentile_interval(float(values.mean()), values[drawn].mean(axis=1)))
    return {
        "slides": len(slides),
        "tiles": sum(len(slide.carries) for slide in slides),
        "share": fmean(float(slide.carries.mean()) for slide in slides) if slides else None,
        "found": found,
    }


def _choose_typical(slides: Sequence[_PositiveSlide]) -> _PositiveSlide | None:
    """Choose the slide to show: the one with the median AUC of attention."""
    ranked = sorted(slides, key=lambda slide: slide.rank_auc(_AFTER) or 0.0)
    return ranked[(len(ranked) - 1) // 2] if ranked else None

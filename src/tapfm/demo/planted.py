"""How well attention finds the tiles that carry the planted signal, before the encoder learnt and after.

Of each positive slide: how often a tile with the signal has more than one without (AUC). Only of painted slides is
it known which tiles those are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from tapfm.demo.folder import COHORTS, DemoFolder
from tapfm.demo.planted_picture import draw_planted
from tapfm.demo.sizes import ENCODER, TARGET
from tapfm.encoders.features import read_features
from tapfm.metrics.bootstrap import RESAMPLES, interval
from tapfm.metrics.estimate import Estimate
from tapfm.metrics.ranking import auc
from tapfm.prediction.folder import PredictedSlide, PredictionFolder
from tapfm.prediction.tile_table import TileTable
from tapfm.runtime.files import write_atomically
from tapfm.runtime.seeding import rng_for
from tapfm.study.folder import StudyFolder
from tapfm.synthetic.truth import CARRIES, read_truth

_BEFORE, _AFTER, _SAID = "attention before", "attention after", "contribution after"


@dataclass(frozen=True)
class SlideSeen:
    """A positive slide: which of its tiles carry the signal, and what ranks them."""

    slide: PredictedSlide
    table: TileTable  # after
    carries: NDArray[np.bool_]
    values: Mapping[str, NDArray[np.float64]]

    def found(self, by: str) -> float | None:
        """Say how often a tile with the signal stands above one without."""
        return auc(self.carries, self.values[by])


def measure_planted(folder: DemoFolder) -> None:
    """Measure it on both cohorts, write the figures, and draw one slide."""
    seen = {cohort: _positives_of(folder, cohort) for cohort in COHORTS}
    figures = {cohort: figures_of(cohort, slides) for cohort, slides in seen.items()}
    typical = typical_of(seen["external"] or seen["test"])
    if typical is not None:
        truth = read_truth(folder.painted / "truth", typical.slide.slide_id)
        draw_planted(folder.planted_picture, typical.slide, typical.table, typical.values, truth)
    write_atomically(folder.planted, f"{json.dumps(figures, indent=2)}\n".encode())


def _positives_of(folder: DemoFolder, cohort: str) -> list[SlideSeen]:
    """Read the positive slides of a cohort that have tiles of both kinds."""
    predictions, found = PredictionFolder(folder.predictions(cohort)), []
    features = StudyFolder(folder.study).features(ENCODER, cohort)
    for slide in predictions.slides():
        truth, table = read_truth(folder.painted / "truth", slide.slide_id), predictions.tiles(slide.slide_id)
        carries = truth.signal(TARGET, table.positions, slide.side_px0) >= CARRIES
        if carries.all() or not carries.any():
            continue
        before = _attention_before(features, slide.slide_id, table)
        after, said = table.values["attention"], table.values[f"contribution.{TARGET}"]
        found.append(SlideSeen(slide, table, carries, {_BEFORE: before, _AFTER: after, _SAID: said}))
    return found


def _attention_before(features: Path, slide_id: str, table: TileTable) -> NDArray[np.float64]:
    """Read what the encoder attended to before it learnt: the features that the fixed regime learns from have it."""
    stored = read_features(features / f"{slide_id}.h5")
    assert stored.attention is not None
    assert stored.positions is not None
    place = {(int(x), int(y)): index for index, (x, y) in enumerate(stored.positions)}
    return stored.attention[[place[int(x), int(y)] for x, y in table.positions]].astype(np.float64)


def figures_of(cohort: str, slides: Sequence[SlideSeen]) -> dict[str, object]:
    """Take the mean over slides, with an interval by drawing them again (a painted patient has one)."""
    drawn = rng_for(0, "planted tiles", cohort).integers(max(1, len(slides)), size=(RESAMPLES, len(slides)))
    found: dict[str, object] = {}
    for by in (_BEFORE, _AFTER, _SAID):
        values = np.array([slide.found(by) for slide in slides], dtype=np.float64)
        if slides:
            found[by] = asdict(interval(float(values.mean()), values[drawn].mean(axis=1)))
        else:
            found[by] = asdict(Estimate(None, why="no positive slide"))
    tiles = sum(len(slide.carries) for slide in slides)
    return {
        "slides": len(slides),
        "tiles": tiles,
        "share": fmean(float(slide.carries.mean()) for slide in slides) if slides else None,
        "found": found,
    }


def typical_of(slides: Sequence[SlideSeen]) -> SlideSeen | None:
    """Choose a slide to show: the one in the middle of those found well and badly, so that it flatters nobody."""
    ranked = sorted(slides, key=lambda slide: slide.found(_AFTER) or 0.0)
    return ranked[(len(ranked) - 1) // 2] if ranked else None

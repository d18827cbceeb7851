"""What adaptation costs in general knowledge: linear probes of adapted encoders, compared with the original ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from tapfm.metrics.bootstrap import percentile_interval
from tapfm.metrics.weighted import aucs
from tapfm.results.estimate import Estimate
from tapfm.results.formatting import format_estimate
from tapfm.results.table import Column, Table, table_row
from tapfm.runtime.seeding import make_rng
from tapfm.study.results import StudyResults
from tapfm.study.runs import StudyMethod, list_fold_runs

_MEASURES = {"accuracy": "Accuracy", "auc": "AUC"}
_SIDES = ("before", "after", "change")
_SIGNED = "+.3f"
Draws = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ForgettingResult:
    """Probes of a method's encoders, mean over its runs."""

    title: str
    regime: str
    runs: int
    tiles: int
    found: Mapping[tuple[str, str], Estimate]  # by measure, and before, after or change
    accuracy_changes: Draws  # of all tiles, then of each resample of tiles; the same resamples for all methods
    cosine_distance: float
    linear_cka: float


def summarise_probes(results: StudyResults) -> list[ForgettingResult]:
    """Summarise the probes of each method that has some."""
    study, found = results.study, []
    for each in results.methods:
        runs = [run for seed in study.seeds for run in list_fold_runs(study, each.method, seed)]
        files = [results.folder.probe(run) for run in runs]
        probes = [json.loads(file.read_text("utf-8")) for file in files if file.is_file()]
        if probes:
            found.append(_summarise_method(each.method, probes, study.resamples))
    return found


def _summarise_method(method: StudyMethod, probes: Sequence[Mapping[str, Any]], resamples: int) -> ForgettingResult:
    """Average over runs, with intervals from resampled test tiles."""
    truth = np.array(probes[0]["truth"])
    weights = np.vstack([np.ones(len(truth)), _draw_tiles(truth, resamples)])  # the first row: every tile once
    rows: dict[tuple[str, str], Draws] = {}
    for side in ("before", "after"):
        tables = [np.array(each[side]) for each in probes]
        rows["accuracy", side] = np.mean([_accuracies(weights, table, truth) for table in tables], axis=0)
        rows["auc", side] = np.mean([_macro_aucs(weights, table, truth) for table in tables], axis=0)
    for measure in _MEASURES:
        rows[measure, "change"] = rows[measure, "after"] - rows[measure, "before"]
    return ForgettingResult(
        title=method.title,
        regime=method.regime,
        runs=len(probes),
        tiles=len(truth),
        found={key: percentile_interval(float(row[0]), row[1:]) for key, row in rows.items()},
        accuracy_changes=rows["accuracy", "change"],
        cosine_distance=fmean(each["cosine_distance"] for each in probes),
        linear_cka=fmean(each["linear_cka"] for each in probes),
    )


def _draw_tiles(truth: npt.NDArray[np.int64], resamples: int) -> Draws:
    """Return how often each tile counts in each resample; classes keep their size."""
    counts = np.zeros((resamples, len(truth)))
    for label in np.unique(truth):
        members = np.flatnonzero(truth == label)
        picks = make_rng(0, "probe bootstrap", int(label)).integers(len(members), size=(resamples, len(members)))
        flat = picks + np.arange(resamples)[:, None] * len(members)
        counts[:, members] = np.bincount(flat.ravel(), minlength=flat.size).reshape(flat.shape)
    return counts


def _accuracies(weights: Draws, probabilities: Draws, truth: npt.NDArray[np.int64]) -> Draws:
    """Return the accuracy for every row of weights."""
    return np.asarray(weights @ (probabilities.argmax(1) == truth) / weights.sum(1))


def _macro_aucs(weights: Draws, probabilities: Draws, truth: npt.NDArray[np.int64]) -> Draws:
    """Return the mean AUC of each class against the others, for every row of weights."""
    labels = np.unique(truth)
    return np.asarray(np.mean([aucs(weights, truth == label, probabilities[:, label]) for label in labels], axis=0))


def forgetting_table(found: Sequence[ForgettingResult]) -> Table:
    """Return accuracy and AUC of the probes before and after, and the drift of features."""
    columns = [Column("Model", "model", text=True), Column("runs", "runs", shown=False)]
    columns.append(Column("tiles", "tiles", shown=False))
    columns += [
        Column(side, f"{measure}_{side}", group, _SIGNED if side == "change" else ".3f", interval=True)
        for measure, group in _MEASURES.items()
        for side in _SIDES
    ]
    columns += [Column("cosine distance", "cosine_distance", form=".4f")]
    columns += [Column("linear CKA", "linear_cka", form=".4f")]
    rows = [
        table_row(
            *(each.title, each.runs, each.tiles),
            *(each.found[measure, side] for measure in _MEASURES for side in _SIDES),
            *(each.cosine_distance, each.linear_cka),
        )
        for each in found
    ]
    note = (
        f"A linear probe on frozen features for another task, {found[0].tiles if found else 0:,} test tiles. Ranges "
        "are 95% confidence intervals from resampled tiles. Drift of the features of the same tiles: cosine "
        "distance, the mean of 1 - cos; linear CKA, which is 1 if features are the same up to rotation and scale."
    )
    return Table(columns, rows, notes=[note])


def describe_forgetting(found: Sequence[ForgettingResult]) -> list[str]:
    """Return sentences: did each method lose accuracy, and did TAPFM lose less than others?"""
    sentences = [
        f"{each.title}: {_sign(change, 'accuracy rose', 'accuracy fell', 'no significant change')}, "
        f"{format_estimate(change, _SIGNED)}."
        for each in found
        for change in [each.found["accuracy", "change"]]
    ]
    for ours in (each for each in found if each.regime == "tapfm"):
        for other in (each for each in found if each.regime != "tapfm"):
            draws = ours.accuracy_changes - other.accuracy_changes
            kept = percentile_interval(float(draws[0]), draws[1:])
            verb = _sign(
                kept, "keeps more accuracy than", "keeps less accuracy than", "does not differ significantly from"
            )
            sentences.append(f"{ours.title} {verb} {other.title}: {format_estimate(kept, _SIGNED)}.")
    return sentences


def _sign(estimate: Estimate, above: str, below: str, neither: str) -> str:
    """Choose a text by where the confidence interval lies relative to zero."""
    if estimate.low is not None and estimate.low > 0:
        return above
    return below if estimate.high is not None and estimate.high < 0 else neither

"""Did adaptation cost what the encoder knew? Probes of adapted encoders, beside the encoder they began with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from tapfm.metrics.bootstrap import interval
from tapfm.metrics.weighted import aucs
from tapfm.results.estimate import Estimate
from tapfm.runtime.csv_files import csv_text
from tapfm.runtime.seeding import rng_for
from tapfm.study.results import StudyResults
from tapfm.study.runs import Method, PlannedRun
from tapfm.study.table_text import exact

_MEASURES = ("accuracy", "auc")
_SIDES = ("before", "after", "change")
Draws = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ForgettingResult:
    """What the encoders of a method know, mean over its runs."""

    title: str
    regime: str
    runs: int
    tiles: int
    found: Mapping[tuple[str, str], Estimate]  # by measure, and before, after or change
    draws: Mapping[str, Draws]  # of the change, by measure: resamples of tiles, the same for all methods
    cosine_distance: float
    linear_cka: float


def summarise_probes(results: StudyResults) -> list[ForgettingResult]:
    """Sum up the probes of each method."""
    study = results.study
    made = []
    for each in results.methods:
        runs = [PlannedRun(each.method, seed, fold) for seed in study.seeds for fold in study.each_fold]
        files = [results.folder.probe(run) for run in runs]
        probes = [json.loads(file.read_text("utf-8")) for file in files if file.is_file()]
        if probes:
            made.append(_summed_up(each.method, probes, study.resamples))
    return made


def _summed_up(method: Method, probes: Sequence[Mapping[str, Any]], resamples: int) -> ForgettingResult:
    """Average over runs, with intervals by resampling the test tiles within their classes."""
    truth = np.array(probes[0]["truth"])
    weights = np.vstack([np.ones(len(truth)), drawn(truth, resamples)])  # the first row: every tile once
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
        found={key: interval(float(row[0]), row[1:]) for key, row in rows.items()},
        draws={measure: rows[measure, "change"] for measure in _MEASURES},
        cosine_distance=fmean(each["cosine_distance"] for each in probes),
        linear_cka=fmean(each["linear_cka"] for each in probes),
    )


def drawn(truth: npt.NDArray[np.int64], resamples: int) -> Draws:
    """Say how often each tile counts in each resample; classes keep their size."""
    counts = np.zeros((resamples, len(truth)))
    for label in np.unique(truth):
        members = np.flatnonzero(truth == label)
        picks = rng_for(0, "probe bootstrap", int(label)).integers(len(members), size=(resamples, len(members)))
        flat = picks + np.arange(resamples)[:, None] * len(members)
        counts[:, members] = np.bincount(flat.ravel(), minlength=flat.size).reshape(flat.shape)
    return counts


def _accuracies(weights: Draws, probabilities: Draws, truth: npt.NDArray[np.int64]) -> Draws:
    """Compute the accuracy of every row of weights."""
    return np.asarray(weights @ (probabilities.argmax(1) == truth) / weights.sum(1))


def _macro_aucs(weights: Draws, probabilities: Draws, truth: npt.NDArray[np.int64]) -> Draws:
    """Compute the mean AUC of each class against the others, for every row of weights."""
    labels = np.unique(truth)
    return np.asarray(np.mean([aucs(weights, truth == label, probabilities[:, label]) for label in labels], axis=0))


def forgetting_csv(found: Sequence[ForgettingResult]) -> str:
    """Return a line for each method."""
    names = [f"{measure}_{side}{part}" for measure in _MEASURES for side in _SIDES for part in ("", "_low", "_high")]
    rows = []
    for each in found:
        numbers = [
            exact(value)
            for measure in _MEASURES
            for side in _SIDES
            for estimate in [each.found[measure, side]]
            for value in (estimate.value, estimate.low, estimate.high)
        ]
        rows.append([each.title, each.runs, each.tiles, *numbers, exact(each.cosine_distance), exact(each.linear_cka)])
    return csv_text(["model", "runs", "tiles", *names, "cosine_distance", "linear_cka"], rows)


def forgetting_markdown(found: Sequence[ForgettingResult]) -> str:
    """Write it to be read, with what it says of the claim."""
    if not found:
        return "No run is probed yet.\n"
    lines = [
        "| Model | accuracy before | after | change | AUC before | after | change | cosine distance | linear CKA |",
        "|---|---|---|---|---|---|---|--:|--:|",
    ]
    for each in found:
        cells = [_with_interval(each.found[measure, side], side) for measure in _MEASURES for side in _SIDES]
        lines.append(f"| {each.title} | {' | '.join(cells)} | {each.cosine_distance:.4f} | {each.linear_cka:.4f} |")
    lines += [
        "",
        f"A linear probe on frozen features of another task, {found[0].tiles:,} test tiles; intervals by resampling "
        "tiles. Drift of the features of the same tiles: mean 1 - cos, and linear CKA (1: the same up to rotation).",
        "",
        *_verdict(found),
    ]
    return "\n".join(lines) + "\n"


def _with_interval(estimate: Estimate, side: str) -> str:
    """Write a number with its interval."""
    if estimate.value is None:
        return "-"
    form = "+.3f" if side == "change" else ".3f"
    edges = (
        "" if estimate.low is None or estimate.high is None else f" ({estimate.low:{form}} to {estimate.high:{form}})"
    )
    return f"{estimate.value:{form}}{edges}"


def _verdict(found: Sequence[ForgettingResult]) -> list[str]:
    """Say what the numbers say: does adaptation forget, and does TAPFM forget less?"""
    lines = []
    for each in found:
        change = each.found["accuracy", "change"]
        lines.append(f"- {each.title}: {_fate(change)}.")
    others = [each for each in found if each.regime != "tapfm"]
    for ours in (each for each in found if each.regime == "tapfm"):
        for other in others:
            rows = ours.draws["accuracy"] - other.draws["accuracy"]
            kept = interval(float(rows[0]), rows[1:])
            low, high = kept.low, kept.high
            if low is not None and high is not None and low > 0:
                said = "keeps more"
            elif low is not None and high is not None and high < 0:
                said = "keeps less"
            else:
                said = "cannot be told from it"
            lines.append(f"- {ours.title} against {other.title}: {said} ({_with_interval(kept, 'change')} accuracy).")
    return lines


def _fate(change: Estimate) -> str:
    """Say whether knowledge was lost."""
    if change.low is not None and change.high is not None and change.high < 0:
        return f"forgot, {_with_interval(change, 'change')} accuracy"
    if change.low is not None and change.low > 0:
        return f"learnt, {_with_interval(change, 'change')} accuracy"
    return f"no change that could be told, {_with_interval(change, 'change')} accuracy"

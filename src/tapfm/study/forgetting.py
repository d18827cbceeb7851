"""Compare linear probes of adapted encoders with those of the pretrained encoders."""

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
from tapfm.study.runs import StudyModel, list_fold_runs

_MEASURES = {"accuracy": "Accuracy", "auc": "AUC"}
_VALUE_NAMES = ("before", "after", "change")
_SIGNED_FORMAT = "+.3f"
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ForgettingResult:
    """Probe results of a model, averaged over its runs."""

    title: str
    method: str
    runs: int  # number of probed runs
    tiles: int  # number of test tiles
    estimates: Mapping[tuple[str, str], Estimate]  # by (measure, value name), such as ("auc", "before")
    accuracy_changes: FloatArray  # [0]: with all tiles; [1:]: in each resample; all models have the same resamples
    cosine_distance: float
    linear_cka: float


def summarise_probes(results: StudyResults) -> list[ForgettingResult]:
    """Return the probe results of each model that has finished probes."""
    study, summaries = results.study, []
    for each in results.models:
        runs = [run for seed in study.seeds for run in list_fold_runs(study, each.model, seed)]
        files = [results.folder.probe(run) for run in runs]
        probes = [json.loads(file.read_text("utf-8")) for file in files if file.is_file()]
        if probes:
            summaries.append(_summarise_model(each.model, probes, study.resamples))
    return summaries


def _summarise_model(model: StudyModel, probes: Sequence[Mapping[str, Any]], resamples: int) -> ForgettingResult:
    """Average over runs, with confidence intervals from resampled test tiles."""
    truth = np.array(probes[0]["truth"])
    weights = np.vstack(
        [np.ones(len(truth)), _resample_tiles(truth, resamples)]
    )  # in the first row, every tile counts once
    rows: dict[tuple[str, str], FloatArray] = {}
    for encoder in ("before", "after"):
        probabilities = [np.array(each[encoder]) for each in probes]
        rows["accuracy", encoder] = np.mean([_accuracies(weights, each, truth) for each in probabilities], axis=0)
        rows["auc", encoder] = np.mean([_macro_aucs(weights, each, truth) for each in probabilities], axis=0)
    for measure in _MEASURES:
        rows[measure, "change"] = rows[measure, "after"] - rows[measure, "before"]
    return ForgettingResult(
        title=model.title,
        method=model.method,
        runs=len(probes),
        tiles=len(truth),
        estimates={key: percentile_interval(float(row[0]), row[1:]) for key, row in rows.items()},
        accuracy_changes=rows["accuracy", "change"],
        cosine_distance=fmean(each["cosine_distance"] for each in probes),
        linear_cka=fmean(each["linear_cka"] for each in probes),
    )


def _resample_tiles(truth: npt.NDArray[np.int64], resamples: int) -> FloatArray:
    """Return how often each tile is in each resample, as (resamples, tiles). Classes keep their size."""
    counts = np.zeros((resamples, len(truth)))
    for label in np.unique(truth):
        members = np.flatnonzero(truth == label)
        sampled = make_rng(0, "probe bootstrap", int(label)).integers(len(members), size=(resamples, len(members)))
        flat = sampled + np.arange(resamples)[:, None] * len(members)
        counts[:, members] = np.bincount(flat.ravel(), minlength=flat.size).reshape(flat.shape)
    return counts


def _accuracies(weights: FloatArray, probabilities: FloatArray, truth: npt.NDArray[np.int64]) -> FloatArray:
    """Return the accuracy for every row of weights."""
    return np.asarray(weights @ (probabilities.argmax(1) == truth) / weights.sum(1))


def _macro_aucs(weights: FloatArray, probabilities: FloatArray, truth: npt.NDArray[np.int64]) -> FloatArray:
    """Return the one-vs-rest AUC averaged over classes, for every row of weights."""
    labels = np.unique(truth)
    return np.asarray(np.mean([aucs(weights, truth == label, probabilities[:, label]) for label in labels], axis=0))


def forgetting_table(results: Sequence[ForgettingResult]) -> Table:
    """Return the accuracy and AUC of the probes before and after adaptation, and the drift of the features."""
    columns = [Column("Model", "model", text=True), Column("runs", "runs", shown=False)]
    columns.append(Column("tiles", "tiles", shown=False))
    columns += [
        Column(name, f"{measure}_{name}", group, _SIGNED_FORMAT if name == "change" else ".3f", interval=True)
        for measure, group in _MEASURES.items()
        for name in _VALUE_NAMES
    ]
    columns += [Column("cosine distance", "cosine_distance", float_format=".4f")]
    columns += [Column("linear CKA", "linear_cka", float_format=".4f")]
    rows = [
        table_row(
            *(each.title, each.runs, each.tiles),
            *(each.estimates[measure, name] for measure in _MEASURES for name in _VALUE_NAMES),
            *(each.cosine_distance, each.linear_cka),
        )
        for each in results
    ]
    note = (
        f"Linear probe on frozen features for another task ({results[0].tiles if results else 0:,} test tiles), before "
        "and after adaptation, with 95% confidence intervals (bootstrap of tiles). Drift of the features of the same "
        "tiles: cosine distance is the mean of 1 - cos; linear CKA is 1 if features are equal up to rotation and scale."
    )
    return Table(columns, rows, notes=[note])


def describe_forgetting(results: Sequence[ForgettingResult]) -> list[str]:
    """Return sentences about the change of accuracy of each model, and comparisons of TAPFM with the other models."""
    sentences = [f"{each.title}: {_describe_change(each.estimates['accuracy', 'change'])}." for each in results]
    for tapfm in (each for each in results if each.method == "tapfm"):
        for other in (each for each in results if each.method != "tapfm"):
            differences = tapfm.accuracy_changes - other.accuracy_changes
            difference = percentile_interval(float(differences[0]), differences[1:])
            verb = _choose_by_sign(
                difference,
                "is higher than that of",
                "is lower than that of",
                "does not differ significantly from that of",
            )
            sentences.append(
                f"The change of accuracy of {tapfm.title} {verb} {other.title}: "
                f"{format_estimate(difference, _SIGNED_FORMAT)}."
            )
    return sentences


def _describe_change(change: Estimate) -> str:
    text = _choose_by_sign(change, "accuracy increased", "accuracy decreased", "no significant change")
    return f"{text}, {format_estimate(change, _SIGNED_FORMAT)}"


def _choose_by_sign(estimate: Estimate, positive: str, negative: str, neither: str) -> str:
    """Return the text for a confidence interval above zero, for one below zero, or for any other estimate."""
    if estimate.low is not None and estimate.low > 0:
        return positive
    return negative if estimate.high is not None and estimate.high < 0 else neither

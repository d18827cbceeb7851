"""Predictions and histories of the finished runs of a study, read from their files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tapfm.config.study import StudyConfig
from tapfm.errors import InputError
from tapfm.evaluation.predictions import Prediction, read_predictions
from tapfm.study.folder import StudyFolder
from tapfm.study.runs import StudyMethod, list_fold_runs, list_methods
from tapfm.study.steps import EVALUATED, is_evaluated
from tapfm.tasks.target import BASELINE

COHORTS = ("test", "external")
_PREDICTIONS = "predictions.csv"
_BASELINE_PREDICTIONS = "predictions-baseline.csv"

Seeds = Sequence[Sequence[Prediction]]  # the predictions of each seed


@dataclass(frozen=True)
class MethodResult:
    """Histories and predictions of the finished runs of a method."""

    method: StudyMethod
    histories: Mapping[str, Sequence[Mapping[str, Any]]]  # by name of run
    predictions: Mapping[str, Seeds]  # by cohort


@dataclass(frozen=True)
class StudyResults:
    """All that tables and figures are made from."""

    study: StudyConfig
    folder: StudyFolder
    methods: Sequence[MethodResult]
    baseline: Mapping[tuple[str, str | None], Seeds]  # by cohort, and by target of one model for each

    def predictions(self, cohort: str, target: str) -> dict[str, Seeds]:
        """Return the predictions of a cohort that have a target, by row of the table; the baseline is the last."""
        found = {
            each.method.row: each.predictions[cohort]
            for each in self.methods
            if cohort in each.predictions and each.method.target in (None, target)
        }
        baseline = self.baseline.get((cohort, None)) or self.baseline.get((cohort, target))
        return found | {BASELINE: baseline} if found and baseline else found


def collect_results(study: StudyConfig, folder: StudyFolder) -> StudyResults:
    """Read all that is finished."""
    found = [result for method in list_methods(study) if (result := _collect_method(study, folder, method)).histories]
    baseline: dict[tuple[str, str | None], Seeds] = {}
    for method in (each.method for each in found):
        for seed in study.seeds:
            for cohort, places in _evaluations(study, folder, method, seed).items():
                files = [place / _BASELINE_PREDICTIONS for place in places]
                needed = [*files, *(place / EVALUATED for place in places)]
                # the same beside each method of a target: it learns from the training slides
                if (cohort, method.target) not in baseline and all(map(Path.is_file, needed)):
                    baseline[cohort, method.target] = [_pool_folds(files)]
    return StudyResults(study, folder, found, baseline)


def _collect_method(study: StudyConfig, folder: StudyFolder, method: StudyMethod) -> MethodResult:
    histories: dict[str, list[dict[str, Any]]] = {}
    predictions: dict[str, list[list[Prediction]]] = {}
    for seed in study.seeds:
        for run in list_fold_runs(study, method, seed):
            if folder.finished(run, study.allow_failures):
                histories[run.name] = folder.history(run)
        for cohort, places in _evaluations(study, folder, method, seed).items():
            slides = study.cohort if cohort == "test" else study.external
            assert slides is not None
            if all(is_evaluated(place, study, slides) for place in places):  # all folds or none
                predictions.setdefault(cohort, []).append(_pool_folds([place / _PREDICTIONS for place in places]))
    return MethodResult(method, histories, predictions)


def _evaluations(study: StudyConfig, folder: StudyFolder, method: StudyMethod, seed: int) -> dict[str, list[Path]]:
    """Return the evaluations that make up each cohort: those of all folds, and on external slides their ensemble."""
    runs = list_fold_runs(study, method, seed)
    places = {"test": [folder.evaluation(run, "test") for run in runs]}
    if study.external is not None:
        one = folder.ensemble_evaluation(method, seed) if study.folds else folder.evaluation(runs[0], "external")
        places["external"] = [one]
    return places


def _pool_folds(files: Sequence[Path]) -> list[Prediction]:
    """Pool the predictions of folds: each slide, and each patient, is in the test part of one of them."""
    pooled: list[Prediction] = []
    seen: dict[tuple[str | None, str], Path] = {}
    for file in files:
        predictions = read_predictions(file)
        for each in predictions:
            if seen.setdefault((each.cohort, each.patient_id), file) != file:
                other = seen[each.cohort, each.patient_id]
                raise InputError(
                    f"Patient {each.patient_id} is tested in two folds: {other} and {file}.",
                    hint="Make folds of which each patient is tested in one: tapfm split COHORT.csv --folds 5",
                )
        pooled += predictions
    return pooled


def find_best_epoch(history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the epoch that was kept: the one with the highest score, of equal ones the first."""
    scored = [row for row in history if row["score"] is not None]
    return max(scored, key=lambda row: row["score"]) if scored else history[-1]


def means_by_epoch(histories: Iterable[Sequence[Mapping[str, Any]]], key: str) -> dict[int, float]:
    """Average a number of each epoch over the runs that have it."""
    by_epoch: dict[int, list[float]] = {}
    for history in histories:
        for row in history:
            if row[key] is not None:
                by_epoch.setdefault(row["epoch"], []).append(row[key])
    return {epoch: fmean(values) for epoch, values in sorted(by_epoch.items())}


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None

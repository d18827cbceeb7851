"""Read the predictions and training histories of the finished runs of a study."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tapfm.config.study import StudyConfig
from tapfm.errors import InputError
from tapfm.evaluation.predictions import Prediction, read_predictions
from tapfm.study.folder import StudyFolder
from tapfm.study.runs import StudyModel, list_fold_runs, list_models
from tapfm.study.steps import METRICS_FILE, is_evaluated
from tapfm.tasks.target import BASELINE

COHORTS = ("test", "external")
_PREDICTIONS = "predictions.csv"
_VALIDATION_PREDICTIONS = "predictions-val.csv"  # of a run
_BASELINE_PREDICTIONS = "predictions-baseline.csv"

SeedPredictions = Sequence[Sequence[Prediction]]  # one list of predictions per seed


@dataclass(frozen=True)
class ModelResult:
    """Training histories and predictions of the finished runs of a model."""

    model: StudyModel
    histories: Mapping[str, Sequence[Mapping[str, Any]]]  # by run name
    predictions: Mapping[str, SeedPredictions]  # by cohort
    validation: Mapping[str, Sequence[Prediction]] = field(default_factory=dict)  # of validation slides, by run name


@dataclass(frozen=True)
class StudyResults:
    """Results of a study, from which its tables and figures are computed."""

    study: StudyConfig
    folder: StudyFolder
    models: Sequence[ModelResult]
    # by cohort, and by target if each target has its own model
    baseline: Mapping[tuple[str, str | None], SeedPredictions]

    def predictions(self, cohort: str, target: str) -> dict[str, SeedPredictions]:
        """Return the predictions of each model for a target and cohort, by `row_key`; the baseline is last."""
        by_row = {
            each.model.row_key: each.predictions[cohort]
            for each in self.models
            if cohort in each.predictions and each.model.target in (None, target)
        }
        baseline = self.baseline.get((cohort, None)) or self.baseline.get((cohort, target))
        return by_row | {BASELINE: baseline} if by_row and baseline else by_row


def collect_results(study: StudyConfig, folder: StudyFolder) -> StudyResults:
    """Read the results of all finished runs and evaluations."""
    models = [result for model in list_models(study) if (result := _collect_model(study, folder, model)).histories]
    baseline: dict[tuple[str, str | None], SeedPredictions] = {}
    for model in (each.model for each in models):
        for seed in study.seeds:
            for cohort, folders in _list_evaluations(study, folder, model, seed).items():
                files = [evaluation / _BASELINE_PREDICTIONS for evaluation in folders]
                needed = [*files, *(evaluation / METRICS_FILE for evaluation in folders)]
                # all models of a target have the same baseline, because it is trained on the same slides
                if (cohort, model.target) not in baseline and all(map(Path.is_file, needed)):
                    baseline[cohort, model.target] = [_pool_folds(files)]
    return StudyResults(study, folder, models, baseline)


def _collect_model(study: StudyConfig, folder: StudyFolder, model: StudyModel) -> ModelResult:
    histories: dict[str, list[dict[str, Any]]] = {}
    predictions: dict[str, list[list[Prediction]]] = {}
    validation: dict[str, list[Prediction]] = {}
    for seed in study.seeds:
        for run in list_fold_runs(study, model, seed):
            if folder.is_finished(run, study.allowed_failures):
                histories[run.name] = folder.read_history(run)
                if (file := folder.run(run) / _VALIDATION_PREDICTIONS).is_file():
                    validation[run.name] = read_predictions(file)
        for cohort, folders in _list_evaluations(study, folder, model, seed).items():
            slides = study.cohort if cohort == "test" else study.external
            assert slides is not None
            if all(is_evaluated(evaluation, study, slides) for evaluation in folders):  # all folds or none
                files = [evaluation / _PREDICTIONS for evaluation in folders]
                predictions.setdefault(cohort, []).append(_pool_folds(files))
    return ModelResult(model, histories, predictions, validation)


def _list_evaluations(study: StudyConfig, folder: StudyFolder, model: StudyModel, seed: int) -> dict[str, list[Path]]:
    """Return the evaluation folders by cohort. With folds: one per fold for `test`, the ensemble for `external`."""
    runs = list_fold_runs(study, model, seed)
    folders = {"test": [folder.evaluation(run, "test") for run in runs]}
    if study.external is not None:
        ensemble = folder.ensemble_evaluation(model, seed)
        folders["external"] = [ensemble if study.folds else folder.evaluation(runs[0], "external")]
    return folders


def _pool_folds(files: Sequence[Path]) -> list[Prediction]:
    """Return the test predictions of all folds. Raises InputError if a patient is in the test split of two folds."""
    pooled: list[Prediction] = []
    seen: dict[tuple[str | None, str], Path] = {}
    for file in files:
        predictions = read_predictions(file)
        for each in predictions:
            if seen.setdefault((each.cohort, each.patient_id), file) != file:
                other = seen[each.cohort, each.patient_id]
                raise InputError(
                    f"Patient {each.patient_id} is in the test split of two folds: {other} and {file}.",
                    hint="Create folds that test each patient once: tapfm split COHORT.csv --folds 5",
                )
        pooled += predictions
    return pooled


def find_best_epoch(history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the first epoch with the highest score, or the last epoch if no epoch has a score."""
    scored = [row for row in history if row["score"] is not None]
    return max(scored, key=lambda row: row["score"]) if scored else history[-1]


def average_by_epoch(histories: Iterable[Sequence[Mapping[str, Any]]], key: str) -> dict[int, float]:
    """Return the mean of a metric by epoch, over the runs that have a value."""
    by_epoch: dict[int, list[float]] = {}
    for history in histories:
        for row in history:
            if row[key] is not None:
                by_epoch.setdefault(row["epoch"], []).append(row[key])
    return {epoch: fmean(values) for epoch, values in sorted(by_epoch.items())}


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if all are."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None

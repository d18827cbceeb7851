"""Validation AUCs of the models of a study, and the choice of a model by them. Test slides are not used to choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from tapfm.evaluation.metric_values import MACRO
from tapfm.evaluation.model_comparison import compare_models
from tapfm.evaluation.predictions import compute_scores
from tapfm.results.estimate import Estimate
from tapfm.study.results import ModelResult, StudyResults, find_best_epoch, mean_or_none
from tapfm.tasks.catalog import target_kinds

RUN_CHOICE_RULE = "highest validation AUC; if equal, the lowest validation loss"
CHOICE_RULE = f"{RUN_CHOICE_RULE} (mean over the runs of a model)"
_DECIMALS = 6  # AUCs that are equal after rounding are equal: their means over runs have rounding errors
_FOLDS_REASON = "no confidence interval: the mean over folds with different validation slides"


@dataclass(frozen=True)
class ValidationScore:
    """Result of a model on validation slides: the mean over its runs."""

    auc: Estimate
    patients: int
    slides: int
    loss: float | None  # at the selected epochs


def score_on_validation(results: StudyResults, target: str) -> dict[str, ValidationScore]:
    """Return the scores of all models for a target (or their mean, "macro"), by `row_key`.

    Models without validation predictions have none. Without folds, only patients that all models have are used.
    """
    models = {
        each.model.row_key: each for each in results.models if each.validation and each.model.target in (None, target)
    }
    if not models:
        return {}
    if results.study.folds:
        return {name: _score_folds(results, each, target) for name, each in models.items()}
    targets = target_kinds(results.study.targets if target == MACRO else [target])
    predictions = {name: list(each.validation.values()) for name, each in models.items()}
    first = next(iter(predictions))
    # a single model is compared with itself, so that its confidence interval is computed in the same way
    compared = predictions if len(predictions) > 1 else {**predictions, f"{first} again": predictions[first]}
    study = results.study
    comparison = compare_models(compared, targets, study.unit, resamples=study.resamples, against=first)
    return {
        name: ValidationScore(
            comparison.aucs[name, target], comparison.patient_count, comparison.slide_count, _mean_loss(each)
        )
        for name, each in models.items()
    }


def _score_folds(results: StudyResults, model: ModelResult, target: str) -> ValidationScore:
    """Return the mean over runs with different validation slides."""
    targets = target_kinds(results.study.targets if target == MACRO else [target])
    scores = [compute_scores(each, targets, results.study.unit) for each in model.validation.values()]
    values = [each.macro if target == MACRO else each.auc[target] for each in scores]
    slides = {(each.cohort, each.patient_id, each.slide_id) for run in model.validation.values() for each in run}
    estimate = Estimate(mean_or_none(values), reason=_FOLDS_REASON)
    return ValidationScore(estimate, len({slide[:2] for slide in slides}), len(slides), _mean_loss(model))


def _mean_loss(model: ModelResult) -> float | None:
    losses = [find_best_epoch(history).get("val_loss") for history in model.histories.values()]
    known = [loss for loss in losses if loss is not None]
    return fmean(known) if len(known) == len(losses) else None


def choose_model(scores: Mapping[str, ValidationScore]) -> str | None:
    """Return the model that `RUN_CHOICE_RULE` chooses; None unless there are several models with a validation AUC.

    If AUC and loss are equal, it is the first model.
    """
    known = {name: score for name, score in scores.items() if score.auc.value is not None}
    if len(known) < 2:
        return None

    def rank(name: str) -> tuple[float, float]:
        score = known[name]
        return -round(score.auc.value or 0.0, _DECIMALS), float("inf") if score.loss is None else score.loss

    return min(known, key=rank)

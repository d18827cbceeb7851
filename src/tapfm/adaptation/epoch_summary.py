"""Metrics of an epoch: its line in history.jsonl, and the score that selects the best epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tapfm.adaptation.learner import Learner
from tapfm.evaluation.predictions import LabelledSlide, Prediction, Unit, compute_scores
from tapfm.runs.run_progress import SUMMED_METRICS, RunProgress


def build_epoch_row(
    learner: Learner,
    progress: RunProgress,
    training: Sequence[LabelledSlide],
    predictions: Sequence[Prediction],
    unit: Unit,
) -> dict[str, Any]:
    """Return an epoch's line of history.jsonl. `predictions` are those of the validation slides."""
    sums, targets = progress.sums, learner.model.task.target_kinds
    encoder_rate, aggregator_rate = learner.learning_rates(progress.epoch)
    training_predictions = [
        slide.prediction(targets, sums.logits[slide.slide_id], 0) for slide in training if slide.slide_id in sums.logits
    ]
    train, val = compute_scores(training_predictions, targets, unit), compute_scores(predictions, targets, unit)
    loss = _mean_loss(learner, predictions)
    return {
        "epoch": progress.epoch + 1,
        **{name: sums.sums[name] / max(sums.slides, 1) for name in SUMMED_METRICS},
        "train_auc": dict(train.auc),
        "train_macro_auc": train.macro,
        "val_auc": dict(val.auc),
        "val_macro_auc": val.macro,
        "val_undefined": dict(val.undefined_reasons),
        "val_loss": loss,
        "encoder_lr": encoder_rate,
        "aggregator_lr": aggregator_rate,
        "slides": sums.slides,
        "slides_failed": len(progress.failed),
        "tiles": sums.tiles,
        "tiles_failed": sums.tiles_failed,
        "seconds": round(sums.seconds, 3),
        "tiles_per_second": round(sums.tiles_per_second, 2),
        "data_wait_fraction": round(sums.data_wait_fraction, 4),
        "peak_memory_gib": round(sums.peak_bytes / 2**30, 3),
    }


def choose_selection_rule(row: Mapping[str, Any]) -> str:
    """Return the rule that selects the best epoch: validation AUC, else validation loss, else the last epoch."""
    if row["val_macro_auc"] is not None:
        return "auc"
    return "loss" if row["val_loss"] is not None else "last"


def is_better(score: float | None, best: float | None) -> bool:
    """Return whether a score is better than the best so far. A tie or a missing score is not."""
    return score is not None and (best is None or score > best)


def compute_selection_score(row: Mapping[str, Any], rule: str, epoch: int) -> float | None:
    """Return the score of an epoch, where higher is better. None if the epoch has no value for this rule."""
    if rule == "loss":
        return None if row["val_loss"] is None else -row["val_loss"]
    return {"auc": row["val_macro_auc"], "last": epoch}[rule]


def _mean_loss(learner: Learner, predictions: Sequence[Prediction]) -> float | None:
    """Return the mean L_agg over slides, or None if there are none."""
    if not predictions:
        return None
    task = learner.model.task
    losses = []
    for each in predictions:
        logits_C = torch.tensor(list(each.logits.values()), dtype=torch.float64)
        losses.append(task.loss(logits_C, task.encode(list(each.labels.values()))))
    return float(torch.stack(losses).mean())

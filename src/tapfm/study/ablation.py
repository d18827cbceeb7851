"""Fit the training loss of each variant with a log-linear model, as in the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tapfm.evaluation.metric_values import MACRO
from tapfm.metrics.loglinear import LogLinearFit, fit_log_linear
from tapfm.results.estimate import Estimate
from tapfm.results.table import Cell, Column, Row, Table, table_row
from tapfm.study.comparison import StudyComparison
from tapfm.study.results import StudyResults, average_by_epoch, find_best_epoch, mean_or_none

_FIRST_EPOCH, _LAST_EPOCH = 2, 20  # as in the paper
_COLUMNS = (
    Column("Model", "model", text=True),
    Column("variant", "variant", text=True, shown=False),
    Column("a", "a", shown=False),
    Column("b (95% CI)", "b", float_format="+.4f", interval=True),
    Column("R²", "r_squared", float_format=".4f"),
    Column("first epoch", "first_epoch", shown=False),
    Column("last epoch", "last_epoch", shown=False),
    Column("best epoch", "best_epoch", float_format=".4g"),
    Column("validation AUC", "val_auc", float_format=".4f"),
    Column("test AUC (95% CI)", "test_auc", float_format=".4f", interval=True, interval_format=".3f"),
    Column("reason", "reason", text=True, shown=False),
)


@dataclass(frozen=True)
class ModelFit:
    """Training loss of a model, averaged over its runs, and the log-linear fit of it."""

    title: str
    variant: str
    losses: Mapping[int, float]  # mean of L_agg by epoch
    fit: LogLinearFit
    best_epoch: float
    val_auc: float | None
    test: Estimate


def fit_losses(results: StudyResults, comparison: StudyComparison) -> list[ModelFit]:
    study = results.study
    aucs = {model.row_key: model.aucs for model in comparison.models}
    fits = []
    for each in results.models:
        model, histories = each.model, list(each.histories.values())
        target = MACRO if study.is_multilabel else model.target or study.targets[0]
        test = aucs.get(model.row_key, {}).get(("test", target))
        losses = average_by_epoch(histories, "loss_agg")
        fits.append(
            ModelFit(
                title=model.title,
                variant=model.variant or model.title,
                losses=losses,
                fit=fit_log_linear(losses, _FIRST_EPOCH, _LAST_EPOCH),
                best_epoch=fmean(find_best_epoch(history)["epoch"] for history in histories),
                val_auc=mean_or_none([find_best_epoch(history)["val_macro_auc"] for history in histories]),
                test=Estimate(None, reason="not evaluated") if test is None else test.auc,
            )
        )
    return fits


def ablation_table(fits: Sequence[ModelFit]) -> Table:
    """Return the coefficients of each fit, with the best epoch and its AUCs."""
    last = max((each.fit.epochs_used[-1] for each in fits if each.fit.epochs_used), default=_LAST_EPOCH)
    note = (
        f"Fit of log L = a + b k for epochs k from {_FIRST_EPOCH} to {last}, where L is the mean of the loss L_agg in "
        "an epoch. A more negative b is a faster decrease. CI: confidence interval."
    )
    return Table(_COLUMNS, [_variant_row(each) for each in fits], notes=[note])


def _variant_row(model: ModelFit) -> Row:
    fit, epochs = model.fit, model.fit.epochs_used
    slope = Estimate(fit.b, fit.b_low, fit.b_high, fit.reason if fit.b is None else "")
    return table_row(
        *(model.title, model.variant, fit.a, slope),
        Cell(fit.r_squared, reason=fit.reason),
        *((epochs[0], epochs[-1]) if epochs else (None, None)),
        *(model.best_epoch, model.val_auc, model.test, fit.reason or model.test.reason),
    )

"""The paper's log-linear fit of the training loss, for each variant of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tapfm.evaluation.metric_values import MACRO
from tapfm.metrics.loglinear import LogLinearFit, fit_log_linear
from tapfm.results.estimate import Estimate
from tapfm.results.table import Cell, Column, Row, Table, table_row
from tapfm.study.comparison import StudyComparison
from tapfm.study.results import StudyResults, find_best_epoch, mean_or_none, means_by_epoch

_FIRST, _LAST = 2, 20  # the paper's epochs
_COLUMNS = (
    Column("Model", "model", text=True),
    Column("variant", "variant", text=True, shown=False),
    Column("a", "a", shown=False),
    Column("b (95% CI)", "b", form="+.4f", interval=True),
    Column("R²", "r_squared", form=".4f"),
    Column("first epoch", "first_epoch", shown=False),
    Column("last epoch", "last_epoch", shown=False),
    Column("best epoch", "best_epoch", form=".4g"),
    Column("validation AUC", "val_auc", form=".4f"),
    Column("test AUC (95% CI)", "test_auc", form=".4f", interval=True, interval_form=".3f"),
    Column("reason", "reason", text=True, shown=False),
)


@dataclass(frozen=True)
class FittedMethod:
    """The training loss of a method, mean over its runs, and the fit to it."""

    title: str
    variant: str
    losses: Mapping[int, float]  # L_agg by epoch
    fit: LogLinearFit
    best_epoch: float
    val_auc: float | None
    test: Estimate


def fit_losses(results: StudyResults, comparison: StudyComparison) -> list[FittedMethod]:
    """Fit the training loss of each method."""
    study = results.study
    compared = {method.row: method.aucs for method in comparison.methods}
    fitted = []
    for each in results.methods:
        method, histories = each.method, list(each.histories.values())
        target = MACRO if study.multilabel else method.target or study.targets[0]
        test = compared.get(method.row, {}).get(("test", target))
        losses = means_by_epoch(histories, "loss_agg")
        fitted.append(
            FittedMethod(
                title=method.title,
                variant=method.variant or method.title,
                losses=losses,
                fit=fit_log_linear(losses, _FIRST, _LAST),
                best_epoch=fmean(find_best_epoch(history)["epoch"] for history in histories),
                val_auc=mean_or_none([find_best_epoch(history)["val_macro_auc"] for history in histories]),
                test=Estimate(None, reason="not evaluated") if test is None else test.auc,
            )
        )
    return fitted


def ablation_table(fitted: Sequence[FittedMethod]) -> Table:
    """Return the fits, with the epoch that was kept and its AUCs."""
    last = max((each.fit.epochs_used[-1] for each in fitted if each.fit.epochs_used), default=_LAST)
    note = (
        f"Fit of log L = a + b k over the epochs k from {_FIRST} to {last}, where L is the mean of L_agg in an epoch. "
        "CI: confidence interval."
    )
    return Table(_COLUMNS, [_variant_row(each) for each in fitted], notes=[note])


def _variant_row(fitted: FittedMethod) -> Row:
    of_fit, epochs = fitted.fit, fitted.fit.epochs_used
    slope = Estimate(of_fit.b, of_fit.b_low, of_fit.b_high, of_fit.reason if of_fit.b is None else "")
    return table_row(
        *(fitted.title, fitted.variant, of_fit.a, slope),
        Cell(of_fit.r_squared, reason=of_fit.reason),
        *((epochs[0], epochs[-1]) if epochs else (None, None)),
        *(fitted.best_epoch, fitted.val_auc, fitted.test, of_fit.reason or fitted.test.reason),
    )

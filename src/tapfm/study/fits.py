"""How training went: the paper's log-linear fit of the loss, and how smooth its path was."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from tapfm.metrics.loglinear import LogLinearFit, fit
from tapfm.results.estimate import Estimate
from tapfm.runtime.csv_files import csv_text
from tapfm.study.results import MethodResult, StudyResults, best_row, mean_of
from tapfm.study.table_text import exact
from tapfm.study.tables import MACRO, ResultTable, row_key

_FIRST, _LAST = 2, 20  # the paper's epochs
_ORDERS = ("before", "after", "joint")
_ABLATION_COLUMNS = (
    *("model", "variant", "a", "b", "b_low", "b_high", "r_squared", "first_epoch", "last_epoch", "best_epoch"),
    *("val_auc", "test_auc", "test_low", "test_high", "why"),
)
MEASURES = {
    "residual": "spread of log L around its fit",
    "step": "mean size of the change of log L from epoch to epoch",
    "rises": "share of epochs in which L rose",
    "norm_spread": "spread of the encoder's gradient norm, over its mean",
}


@dataclass(frozen=True)
class FittedMethod:
    """One value of what is varied."""

    title: str
    variant: str
    losses: Mapping[int, float]  # L_agg by epoch, mean over runs
    fit: LogLinearFit
    best_epoch: float
    val_auc: float | None
    test: Estimate


def fits_of(results: StudyResults, table: ResultTable) -> list[FittedMethod]:
    """Fit the loss of each method."""
    column = MACRO if results.study.multilabel else None
    tests = {
        (row_key((row.encoder, row.regime, row.aggregator, row.variant)), place): cell.auc
        for row in table.rows
        for place, cell in row.cells.items()
    }
    fitted = []
    for each in results.methods:
        histories = list(each.histories.values())
        target = column or each.method.target or results.study.targets[0]
        losses = _mean_losses(histories)
        fitted.append(
            FittedMethod(
                title=each.method.title,
                variant=each.method.variant or each.method.title,
                losses=losses,
                fit=fit(losses, _FIRST, _LAST),
                best_epoch=fmean(best_row(history)["epoch"] for history in histories),
                val_auc=mean_of([best_row(history)["val_macro_auc"] for history in histories]),
                test=tests.get((row_key(each.method.row), ("test", target)), Estimate(None, why="not evaluated")),
            )
        )
    return fitted


def _mean_losses(histories: Sequence[Sequence[Mapping[str, Any]]]) -> dict[int, float]:
    """Average L_agg of each epoch over the runs that had it."""
    by_epoch: dict[int, list[float]] = {}
    for history in histories:
        for row in history:
            by_epoch.setdefault(row["epoch"], []).append(row["loss_agg"])
    return {epoch: fmean(values) for epoch, values in sorted(by_epoch.items())}


def ablation_csv(fitted: Sequence[FittedMethod]) -> str:
    """Return a line for each variant."""
    rows = []
    for each in fitted:
        of_fit = each.fit
        epochs = of_fit.epochs_used
        rows.append(
            [each.title, each.variant]
            + [exact(value) for value in (of_fit.a, of_fit.b, of_fit.b_low, of_fit.b_high, of_fit.r_squared)]
            + [epochs[0] if epochs else "", epochs[-1] if epochs else "", repr(each.best_epoch), exact(each.val_auc)]
            + [exact(value) for value in (each.test.value, each.test.low, each.test.high)]
            + [of_fit.why or each.test.why]
        )
    return csv_text(_ABLATION_COLUMNS, rows)


def ablation_markdown(fitted: Sequence[FittedMethod]) -> str:
    """Write it to be read."""
    if not fitted:
        return "No run is finished yet.\n"
    lines = [
        "| Model | b | 95% interval | R² | best epoch | validation AUC | test AUC |",
        "|---|--:|---|--:|--:|--:|---|",
    ]
    for each in fitted:
        of_fit = each.fit
        numbers = [_signed(of_fit.b), _between(of_fit.b_low, of_fit.b_high, "+.4f"), _plain(of_fit.r_squared)]
        test = _plain(each.test.value) + (
            f" ({_between(each.test.low, each.test.high, '.3f')})" if each.test.low is not None else ""
        )
        lines.append(
            f"| {each.title} | {' | '.join(numbers)} | {each.best_epoch:.3g} | {_plain(each.val_auc)} | {test} |"
        )
    last = max((each.fit.epochs_used[-1] for each in fitted if each.fit.epochs_used), default=_LAST)
    lines += ["", f"log L_k = a + b k, L_k the mean of L_agg in epoch k, fitted over epochs {_FIRST} to {last}."]
    lines += [f"- {each.title}: no fit: {each.fit.why}" for each in fitted if each.fit.b is None]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Trajectory:
    """How smooth the training of one run was; None where there is too little of it."""

    order: str  # of updates: before, after, joint
    run: str
    pair: tuple[object, ...]  # runs that differ in the order alone
    numbers: Mapping[str, float | None]


def trajectories_of(results: StudyResults) -> list[Trajectory]:
    """Measure every run of a stability study."""
    orders = {each.name: each.settings.get("adaptation", {}).get("bag_gradient") for each in results.study.variants}
    return [
        Trajectory(str(orders[each.method.variant or ""]), name, _partner(each, name), measures_of(history))
        for each in results.methods
        for name, history in each.histories.items()
    ]


def _partner(result: MethodResult, run: str) -> tuple[object, ...]:
    """Name what runs of the three orders have in common."""
    method = result.method
    return method.encoder, method.regime, method.aggregator, method.target, run.removeprefix(method.name)


def measures_of(history: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Measure one run, from its second epoch on: the first is a leap whatever the method."""
    losses = {row["epoch"]: row["loss_agg"] for row in history if row["epoch"] >= _FIRST}
    norms = [row["norm_encoder"] for row in history if row["epoch"] >= _FIRST]
    of_fit = fit(losses, _FIRST, max(losses, default=_FIRST))
    if of_fit.a is None or of_fit.b is None:
        return dict.fromkeys(MEASURES)
    logs = [math.log(loss) for loss in losses.values()]
    steps = [after - before for before, after in itertools.pairwise(logs)]
    residuals = [log - of_fit.a - of_fit.b * epoch for epoch, log in zip(losses, logs, strict=True)]
    return {
        "residual": pstdev(residuals),
        "step": fmean(map(abs, steps)),
        "rises": fmean(step > 0 for step in steps),
        "norm_spread": pstdev(norms) / fmean(norms) if fmean(norms) > 0 else None,
    }


def stability_csv(trajectories: Sequence[Trajectory]) -> str:
    """Return a line for each run."""
    rows = [[each.run, each.order, *(exact(each.numbers[name]) for name in MEASURES)] for each in trajectories]
    return csv_text(["run", "order", *MEASURES], rows)


def stability_markdown(trajectories: Sequence[Trajectory]) -> str:
    """Write means by order of updates, and what they say of the proposition."""
    if not trajectories:
        return "No run is finished yet.\n"
    means = {
        order: {
            name: mean_of([each.numbers[name] for each in trajectories if each.order == order]) for name in MEASURES
        }
        for order in _ORDERS
    }
    lines = [f"| | {' | '.join(_ORDERS)} |", "|---|" + "--:|" * len(_ORDERS)]
    for name, meaning in MEASURES.items():
        lines.append(f"| {meaning} | {' | '.join(_plain(means[order][name]) for order in _ORDERS)} |")
    counts = {order: sum(each.order == order for each in trajectories) for order in _ORDERS}
    lines.append(f"| runs | {' | '.join(str(counts[order]) for order in _ORDERS)} |")
    return "\n".join([*lines, "", *verdict(trajectories)]) + "\n"


def verdict(trajectories: Sequence[Trajectory]) -> list[str]:
    """Say what the numbers say: is joint updating less steady than both others, in run after run?"""
    groups: dict[tuple[object, ...], dict[str, Mapping[str, float | None]]] = {}
    for each in trajectories:
        groups.setdefault(each.pair, {})[each.order] = each.numbers
    whole = [group for group in groups.values() if set(group) == set(_ORDERS)]
    claim = "The paper's proposition says that updating both at once (joint) is less steady than its own order."
    if not whole:
        return [f"{claim} No seed has runs of all three orders yet."]
    lines, worse, better = [claim], 0, 0
    for name, meaning in MEASURES.items():
        signs = [sign for group in whole if (sign := _compared(group, name)) is not None]
        if not signs:
            continue
        higher, lower = signs.count(1), signs.count(-1)
        lines.append(
            f"- {meaning}: joint is above both others in {higher} of {len(signs)} seeds, below both in {lower}."
        )
        worse += higher == len(signs)
        better += lower == len(signs)
    measured = len(lines) - 1
    if not measured:
        said = "There are too few epochs to measure anything."
    elif worse == measured:
        said = "By every measure and in every seed joint is the least steady: these runs support the proposition."
    elif better == measured:
        said = "By every measure and in every seed joint is the steadiest: these runs contradict the proposition."
    else:
        said = (
            f"Joint is the least steady in every seed by {worse} of {measured} measures, and the steadiest by "
            f"{better}: these runs do not settle the proposition."
        )
    few = " With so few seeds that may be chance." if len(whole) < 5 else ""
    return [*lines, "", said + few]


def _compared(group: Mapping[str, Mapping[str, float | None]], name: str) -> int | None:
    """Say where joint lies: 1 above both others, -1 below both, 0 between; None where a number is missing."""
    joint, before, after = (group[order][name] for order in ("joint", "before", "after"))
    if joint is None or before is None or after is None:
        return None
    return 1 if joint > max(before, after) else -1 if joint < min(before, after) else 0


def _signed(value: float | None) -> str:
    """Write a slope."""
    return "-" if value is None else f"{value:+.4f}"


def _plain(value: float | None) -> str:
    """Write a number."""
    return "-" if value is None else f"{value:.4f}"


def _between(low: float | None, high: float | None, form: str) -> str:
    """Write an interval."""
    return "-" if low is None or high is None else f"{low:{form}} to {high:{form}}"

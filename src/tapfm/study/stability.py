"""Measure the stability of training for each order of updates, to test the paper's proposition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from tapfm.metrics.loglinear import fit_log_linear
from tapfm.results.table import Cell, Column, Table, table_row
from tapfm.study.results import StudyResults, mean_or_none

_FIRST_EPOCH = 2  # the loss falls steeply in epoch 1 with any order
_ORDERS = ("before", "after", "joint")
_MIN_COMPARISONS = 5  # fewer seeds may agree by chance
MEASURES = {
    "residual_sd": "standard deviation of log L around its fit",
    "mean_abs_change": "mean absolute change of log L from epoch to epoch",
    "increase_fraction": "fraction of epochs in which L increased",
    "grad_norm_cv": "coefficient of variation of the encoder's gradient norm",
}


@dataclass(frozen=True)
class RunStability:
    """Stability measures of one run."""

    order: str  # of updates: before, after, joint
    run: str
    group: tuple[object, ...]  # the same for runs that differ only in the order
    measures: Mapping[str, float | None]  # None with too few epochs, or if the loss or gradient norm is 0


def measure_stability(results: StudyResults) -> list[RunStability]:
    """Return the measures of every finished run."""
    orders = {each.name: each.settings.get("adaptation", {}).get("bag_gradient") for each in results.study.variants}
    runs = []
    for each in results.models:
        model = each.model
        for run, history in each.histories.items():
            group = model.encoder, model.method, model.aggregator, model.target, run.removeprefix(model.name)
            runs.append(RunStability(str(orders[model.variant or ""]), run, group, _measure_history(history)))
    return runs


def _measure_history(history: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    losses = {row["epoch"]: row["loss_agg"] for row in history if row["epoch"] >= _FIRST_EPOCH}
    norms = [row["norm_encoder"] for row in history if row["epoch"] >= _FIRST_EPOCH]
    fit = fit_log_linear(losses, _FIRST_EPOCH, max(losses, default=_FIRST_EPOCH))
    if fit.a is None or fit.b is None:
        return dict.fromkeys(MEASURES)
    logs = [math.log(loss) for loss in losses.values()]
    changes = [after - before for before, after in itertools.pairwise(logs)]
    residuals = [log - fit.a - fit.b * epoch for epoch, log in zip(losses, logs, strict=True)]
    return {
        "residual_sd": pstdev(residuals),
        "mean_abs_change": fmean(map(abs, changes)),
        "increase_fraction": fmean(change > 0 for change in changes),
        "grad_norm_cv": pstdev(norms) / fmean(norms) if fmean(norms) > 0 else None,
    }


def stability_runs_table(runs: Sequence[RunStability]) -> Table:
    """Return the measures of each run, for stability.csv."""
    columns = [Column("run", text=True), Column("order", text=True), *map(Column, MEASURES)]
    return Table(columns, [table_row(each.run, each.order, *each.measures.values()) for each in runs])


def stability_means_table(runs: Sequence[RunStability]) -> Table:
    """Return the mean of each measure by order of updates."""
    by_order = {order: [each.measures for each in runs if each.order == order] for order in _ORDERS}
    columns = [Column("", text=True), *(Column(order, float_format=".4f") for order in _ORDERS)]
    if not runs:
        return Table(columns, [])
    rows = []
    for name, meaning in MEASURES.items():
        means = [mean_or_none([measures[name] for measures in by_order[order]]) for order in _ORDERS]
        rows.append(
            table_row(meaning, *(Cell(mean, reason="too few epochs" if mean is None else "") for mean in means))
        )
    return Table(columns, [*rows, table_row("runs", *map(len, by_order.values()))])


def describe_stability(runs: Sequence[RunStability]) -> list[str]:
    """Return sentences that compare `joint` with the other orders, and a conclusion about the proposition."""
    by_group: dict[tuple[object, ...], dict[str, Mapping[str, float | None]]] = {}
    for each in runs:
        by_group.setdefault(each.group, {})[each.order] = each.measures
    complete = [orders for orders in by_group.values() if set(orders) == set(_ORDERS)]
    claim = (
        "The paper's proposition: updating the encoder first, and then the aggregator with the updated encoder "
        "(joint), is less stable than computing both updates from the same encoder (before, after). Each comparison "
        "has one run of each order, with the same seed."
    )
    if not complete:
        return [claim, "There are no finished runs of all three orders with the same seed yet."]
    sentences, least, most = [claim], 0, 0
    for name, meaning in MEASURES.items():
        signs = [sign for orders in complete if (sign := _compare_joint_order(orders, name)) is not None]
        if signs:
            highest, lowest = signs.count(1), signs.count(-1)
            counts = f"joint has the highest value in {highest} of {len(signs)} comparisons and the lowest in {lowest}"
            sentences.append(f"{meaning[0].upper()}{meaning[1:]}: {counts}.")
            least += highest == len(signs)
            most += lowest == len(signs)
    measured = len(sentences) - 1
    if not measured:
        conclusion = "The runs have too few epochs to measure stability."
    elif least == measured:
        conclusion = (
            "Joint is the least stable by every measure in every comparison: these runs support the proposition."
        )
    elif most == measured:
        conclusion = (
            "Joint is the most stable by every measure in every comparison: these runs contradict the proposition."
        )
    else:
        conclusion = (
            f"Joint is the least stable in every comparison by {least} of {measured} measures, and the most stable by "
            f"{most} of {measured}. These runs neither support nor contradict the proposition."
        )
    if measured and len(complete) < _MIN_COMPARISONS:
        conclusion += f" With fewer than {_MIN_COMPARISONS} comparisons, this may be due to chance."
    return [*sentences, conclusion]


def _compare_joint_order(measures_by_order: Mapping[str, Mapping[str, float | None]], measure: str) -> int | None:
    """Return 1 if joint is higher than both other orders, -1 if lower than both, else 0; None if a value is missing."""
    joint, before, after = (measures_by_order[order][measure] for order in ("joint", "before", "after"))
    if joint is None or before is None or after is None:
        return None
    return 1 if joint > max(before, after) else -1 if joint < min(before, after) else 0

"""How smooth training was with each order of updates, and whether that supports the paper's proposition."""

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

_FIRST = 2  # epoch: in the first one, the loss falls steeply with every method
_ORDERS = ("before", "after", "joint")
_FEW_SEEDS = 5  # fewer than that may agree by chance
MEASURES = {
    "residual": "spread of log L around its fit",
    "step": "mean size of the change of log L from epoch to epoch",
    "rises": "share of epochs in which L rose",
    "norm_spread": "spread of the encoder's gradient norm, over its mean",
}


@dataclass(frozen=True)
class Trajectory:
    """How smooth the training of one run was; None if it has too few epochs."""

    order: str  # of updates: before, after, joint
    run: str
    pair: tuple[object, ...]  # shared by runs that differ in the order only
    numbers: Mapping[str, float | None]


def measure_trajectories(results: StudyResults) -> list[Trajectory]:
    """Measure every run of a stability study."""
    orders = {each.name: each.settings.get("adaptation", {}).get("bag_gradient") for each in results.study.variants}
    found = []
    for each in results.methods:
        method = each.method
        for run, history in each.histories.items():
            pair = method.encoder, method.regime, method.aggregator, method.target, run.removeprefix(method.name)
            found.append(Trajectory(str(orders[method.variant or ""]), run, pair, _measure_history(history)))
    return found


def _measure_history(history: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Measure one run from its second epoch on."""
    losses = {row["epoch"]: row["loss_agg"] for row in history if row["epoch"] >= _FIRST}
    norms = [row["norm_encoder"] for row in history if row["epoch"] >= _FIRST]
    of_fit = fit_log_linear(losses, _FIRST, max(losses, default=_FIRST))
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


def runs_table(trajectories: Sequence[Trajectory]) -> Table:
    """Return the measures of each run, for CSV files."""
    columns = [Column("run", text=True), Column("order", text=True), *map(Column, MEASURES)]
    return Table(columns, [table_row(each.run, each.order, *each.numbers.values()) for each in trajectories])


def means_table(trajectories: Sequence[Trajectory]) -> Table:
    """Return the mean of each measure by order of updates."""
    by_order = {order: [each.numbers for each in trajectories if each.order == order] for order in _ORDERS}
    columns = [Column("", text=True), *(Column(order, form=".4f") for order in _ORDERS)]
    if not trajectories:
        return Table(columns, [])
    rows = []
    for name, meaning in MEASURES.items():
        means = [mean_or_none([numbers[name] for numbers in by_order[order]]) for order in _ORDERS]
        rows.append(
            table_row(meaning, *(Cell(mean, reason="too few epochs" if mean is None else "") for mean in means))
        )
    return Table(columns, [*rows, table_row("runs", *map(len, by_order.values()))])


def describe_stability(trajectories: Sequence[Trajectory]) -> list[str]:
    """Return sentences: is joint updating less stable than both other orders, by each measure and in each seed?"""
    by_pair: dict[tuple[object, ...], dict[str, Mapping[str, float | None]]] = {}
    for each in trajectories:
        by_pair.setdefault(each.pair, {})[each.order] = each.numbers
    complete = [orders for orders in by_pair.values() if set(orders) == set(_ORDERS)]
    claim = "The paper's proposition: to update both parts at once (joint) is less stable than the paper's own order."
    if not complete:
        return [claim, "No seed has runs of all three orders yet."]
    sentences, least, most = [claim], 0, 0
    for name, meaning in MEASURES.items():
        signs = [sign for orders in complete if (sign := _place_of_joint(orders, name)) is not None]
        if signs:
            above, below = signs.count(1), signs.count(-1)
            place = f"above both others in {above} of {len(signs)} seeds, and below both in {below}"
            sentences.append(f"{meaning[0].upper()}{meaning[1:]}: joint is {place}.")
            least += above == len(signs)
            most += below == len(signs)
    measured = len(sentences) - 1
    if not measured:
        conclusion = "There are too few epochs to measure stability."
    elif least == measured:
        conclusion = "Joint is the least stable by every measure in every seed: these runs support the proposition."
    elif most == measured:
        conclusion = "Joint is the most stable by every measure in every seed: these runs contradict the proposition."
    else:
        conclusion = (
            f"Joint is the least stable in every seed by {least} of {measured} measures, and the most stable by "
            f"{most}: these runs neither support nor contradict the proposition."
        )
    return [*sentences, conclusion + (" With so few seeds, this may be chance." if len(complete) < _FEW_SEEDS else "")]


def _place_of_joint(orders: Mapping[str, Mapping[str, float | None]], name: str) -> int | None:
    """Return 1 if joint is above both other orders, -1 if below both, otherwise 0; None if a number is missing."""
    joint, before, after = (orders[order][name] for order in ("joint", "before", "after"))
    if joint is None or before is None or after is None:
        return None
    return 1 if joint > max(before, after) else -1 if joint < min(before, after) else 0

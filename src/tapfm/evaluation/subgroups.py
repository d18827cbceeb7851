"""Figures by scanner, site, resolution: slides in groups by a column of their table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tapfm.evaluation.metric_values import MACRO, MetricValue, compute_metrics
from tapfm.evaluation.predictions import Prediction, Unit, pool_by_unit
from tapfm.results.estimate import Estimate
from tapfm.tasks.target import TargetKinds

_MOST_VALUES = 8  # of a column of numbers; one with more is cut at its quartiles
_LEAST = 2  # of each class
_EMPTY = "(empty)"


@dataclass(frozen=True)
class Subgroup:
    """Some slides, by a value of a column."""

    column: str
    value: str
    slide_ids: frozenset[str]

    @property
    def name(self) -> str:
        """Name it in tables."""
        return f"{self.column} = {self.value}"


def build_subgroups(columns: Mapping[str, Mapping[str, str]]) -> tuple[list[Subgroup], list[str]]:
    """Group slides by the values of each column, given by slide_id; also returns notes on columns that were cut."""
    groups: list[Subgroup] = []
    notes: list[str] = []
    for column, values in columns.items():
        numbers = _numbers_of(values.values())
        if numbers is not None and len(set(numbers)) > _MOST_VALUES:
            edges = _quartiles(numbers)
            values = {slide_id: _part_of(text, edges) for slide_id, text in values.items()}
            notes.append(f"{column} has {len(set(numbers)):,} values, so it is cut at its quartiles.")
            order = [*(_between(low, high) for low, high in pairwise(edges)), _EMPTY]
        elif numbers is not None:
            order = [*(text for _, text in sorted({(float(each), each) for each in values.values() if each})), _EMPTY]
        else:
            order = sorted({each or _EMPTY for each in values.values()})
        for value in order:
            if members := frozenset(slide_id for slide_id, each in values.items() if (each or _EMPTY) == value):
                groups.append(Subgroup(column, value, members))
    return groups, notes


def _numbers_of(values: Iterable[str]) -> list[float] | None:
    """Read a column as numbers; None where some of it is none."""
    found = []
    for text in values:
        if not text:
            continue
        try:
            number = float(text)
        except ValueError:
            return None
        if not math.isfinite(number):
            return None
        found.append(number)
    return found or None


def _quartiles(numbers: Sequence[float]) -> list[float]:
    """Find the edges of four parts, fewer where they fall together."""
    return sorted({float(edge) for edge in np.quantile(numbers, [0, 0.25, 0.5, 0.75, 1])})


def _part_of(text: str, edges: Sequence[float]) -> str:
    """Name the part that a value is in; one on an edge is in the lower part."""
    if not text:
        return _EMPTY
    number = max(1, int(np.searchsorted(edges, float(text), side="left")))
    return _between(edges[number - 1], edges[number])


def _between(low: float, high: float) -> str:
    """Name a range."""
    return f"{low:.4g} to {high:.4g}"


def evaluate_subgroup(
    group: Subgroup, predictions: Sequence[Prediction], targets: TargetKinds, unit: Unit, *, resamples: int, seed: int
) -> list[MetricValue]:
    """Measure what can be measured without a threshold; too few of a class give nothing but the reason."""
    chosen = [each for each in predictions if each.slide_id in group.slide_ids]
    units = pool_by_unit(chosen, targets, unit)
    few = {
        target: kind.explain_too_few([one.labels.get(target) for one in units], unit, _LEAST)
        for target, kind in targets.items()
    }
    shown = {metric for kind in targets.values() for metric in kind.main_metrics}
    labelled = {target for each in predictions for target, known in each.labels.items() if known is not None}
    # a mean over other targets than that of all slides could not be compared with it
    few[MACRO] = "; ".join(f"{target}: {reason}" for target, reason in few.items() if reason and target in labelled)
    return [
        replace(each, estimate=Estimate(None, reason=few[each.target]), delong=None) if few[each.target] else each
        for each in compute_metrics(chosen, targets, unit, None, resamples=resamples, seed=seed)
        if each.metric in shown
    ]

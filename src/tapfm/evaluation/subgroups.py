"""Metrics of subgroups: slides with the same scanner, site or resolution, by a column of the cohort table."""

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

_MAX_VALUES = 8  # distinct values of a numeric column; with more, its slides are grouped by quartile
_MIN_UNITS = 2  # of each class
_EMPTY = "(empty)"


@dataclass(frozen=True)
class Subgroup:
    """The slides with one value, or a range of values, in a column."""

    column: str
    value: str
    slide_ids: frozenset[str]

    @property
    def name(self) -> str:
        """Name in tables, such as "scanner = A"."""
        return f"{self.column} = {self.value}"


def build_subgroups(columns: Mapping[str, Mapping[str, str]]) -> tuple[list[Subgroup], list[str]]:
    """Return a subgroup for each value of each column, and notes about columns that were grouped by quartile.

    columns: the text of each slide, by column and slide_id.
    """
    groups: list[Subgroup] = []
    notes: list[str] = []
    for column, values in columns.items():
        numbers = _parse_numbers(values.values())
        if numbers is not None and len(set(numbers)) > _MAX_VALUES:
            edges = _quartile_edges(numbers)
            values = {slide_id: _find_range(text, edges) for slide_id, text in values.items()}
            notes.append(f"{column} has {len(set(numbers)):,} distinct values; slides are grouped by quartile.")
            order = [*(_format_range(low, high) for low, high in pairwise(edges)), _EMPTY]
        elif numbers is not None:
            order = [*(text for _, text in sorted({(float(each), each) for each in values.values() if each})), _EMPTY]
        else:
            order = sorted({each or _EMPTY for each in values.values()})
        for value in order:
            if members := frozenset(slide_id for slide_id, each in values.items() if (each or _EMPTY) == value):
                groups.append(Subgroup(column, value, members))
    return groups, notes


def _parse_numbers(values: Iterable[str]) -> list[float] | None:
    """Return the numbers of a column without empty fields; None if it is empty or a value is not a finite number."""
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


def _quartile_edges(numbers: Sequence[float]) -> list[float]:
    """Return minimum, quartiles and maximum; equal edges are merged."""
    return sorted({float(edge) for edge in np.quantile(numbers, [0, 0.25, 0.5, 0.75, 1])})


def _find_range(text: str, edges: Sequence[float]) -> str:
    """Return the name of the range that contains a value; an edge belongs to the lower range."""
    if not text:
        return _EMPTY
    number = max(1, int(np.searchsorted(edges, float(text), side="left")))
    return _format_range(edges[number - 1], edges[number])


def _format_range(low: float, high: float) -> str:
    return f"{low:.4g} to {high:.4g}"


def evaluate_subgroup(
    group: Subgroup, predictions: Sequence[Prediction], targets: TargetKinds, unit: Unit, *, resamples: int, seed: int
) -> list[MetricValue]:
    """Return the main metrics of a subgroup, without values if a class has too few units."""
    chosen = [each for each in predictions if each.slide_id in group.slide_ids]
    units = pool_by_unit(chosen, targets, unit)
    too_few = {
        target: kind.explain_too_few([each.labels.get(target) for each in units], unit, _MIN_UNITS)
        for target, kind in targets.items()
    }
    main_metrics = {metric for kind in targets.values() for metric in kind.main_metrics}
    labelled = {target for each in predictions for target, label in each.labels.items() if label is not None}
    # a mean without some targets would not be comparable with the mean over all slides
    too_few[MACRO] = "; ".join(
        f"{target}: {reason}" for target, reason in too_few.items() if reason and target in labelled
    )
    return [
        replace(each, estimate=Estimate(None, reason=reason), delong=None) if (reason := too_few[each.target]) else each
        for each in compute_metrics(chosen, targets, unit, None, resamples=resamples, seed=seed)
        if each.metric in main_metrics
    ]

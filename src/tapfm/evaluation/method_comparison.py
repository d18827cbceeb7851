"""Methods against each other on the same patients: differences of AUC, with paired intervals and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from tapfm.errors import InputError, UnknownNameError
from tapfm.evaluation.alignment import SeedPredictions, align
from tapfm.evaluation.labelled_units import LabelledUnits, select_labelled_units
from tapfm.evaluation.metric_values import MACRO
from tapfm.evaluation.patients import resample_patients
from tapfm.evaluation.predictions import Unit
from tapfm.metrics.arrays import Floats
from tapfm.metrics.bootstrap import RESAMPLES, Resamples, bootstrap_p_value, percentile_interval
from tapfm.metrics.holm import holm_correction
from tapfm.results.estimate import Estimate
from tapfm.tasks.target import TargetKinds


@dataclass(frozen=True)
class PairedComparison:
    """Two methods on one target ("macro": the mean over targets); the difference is first - second."""

    first: str
    second: str
    target: str
    difference: Estimate
    p_bootstrap: float | None
    p_delong: float | None
    p_holm: float | None  # of DeLong's p where there is one, else of the bootstrap's, over all pairs of the target
    reason: str = ""  # why there is no p_delong


@dataclass(frozen=True)
class Comparison:
    """What a comparison found, and on whom."""

    methods: tuple[str, ...]
    targets: tuple[str, ...]
    unit: Unit
    patients: int
    excluded: Mapping[str, tuple[str, ...]]  # by method, its patients that others lack
    label_conflicts: tuple[str, ...]  # labelled by some methods only; that label is used
    aucs: Mapping[tuple[str, str], Estimate]  # by method and target, or "macro" with several targets
    pairs: tuple[PairedComparison, ...]


@dataclass(frozen=True)
class _MethodAuc:
    """The AUC of one method, the mean over its seeds, and the same in every resample."""

    value: float | None
    draws: Floats
    reason: str = ""  # there is no value, or no interval

    def estimate(self) -> Estimate:
        """Take the interval."""
        return percentile_interval(self.value, self.draws, reason=self.reason)


def compare_methods(
    methods: Mapping[str, SeedPredictions],
    targets: TargetKinds,
    unit: Unit,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    against: str | None = None,
) -> Comparison:
    """Compare the AUCs of methods on the patients that all of them have.

    With several seeds the AUC of a method is the mean of its seeds' AUCs; patients are resampled, seeds are not.
    `against` keeps the pairs with that method only, and makes it the second of each.
    """
    pairs = _pairs_of(methods, against)
    aligned = align(methods, targets, unit)
    columns = {target: select_labelled_units(aligned.units, target, kind, unit) for target, kind in targets.items()}
    logits = {
        target: {name: [column.logits_of(each) for each in seeds] for name, seeds in aligned.seeds.items()}
        for target, column in columns.items()
    }

    def ranked(target: str, strata: TargetKinds) -> dict[str, _MethodAuc]:
        draws = resample_patients(aligned.units, strata, resamples=resamples, seed=seed)
        return _ranked_methods(logits[target], columns[target], draws)

    aucs: dict[tuple[str, str], Estimate] = {}
    tested: list[PairedComparison] = []
    by_target: dict[str, dict[str, _MethodAuc]] = {}
    for target, column in columns.items():
        by_target[target] = ranked(target, {target: targets[target]})
        of_method = logits[target]
        delong = {(first, second): _delong_p(of_method[first], of_method[second], column) for first, second in pairs}
        tested += _tests_of(target, pairs, by_target[target], delong)
    if len(targets) > 1:
        together = {target: ranked(target, targets) for target in targets}
        by_target[MACRO] = {name: _macro_of({t: together[t][name] for t in targets}) for name in methods}
        tested += _tests_of(MACRO, pairs, by_target[MACRO], {})
    for target, of_target in by_target.items():
        aucs |= {(name, target): each.estimate() for name, each in of_target.items()}
    return Comparison(
        methods=tuple(methods),
        targets=tuple(targets),
        unit=unit,
        patients=aligned.patients,
        excluded=aligned.excluded,
        label_conflicts=aligned.label_conflicts,
        aucs=aucs,
        pairs=tuple(tested),
    )


def _pairs_of(methods: Mapping[str, SeedPredictions], against: str | None) -> list[tuple[str, str]]:
    """List the pairs to test, in the order of the methods."""
    if empty := [name for name, seeds in methods.items() if not seeds]:
        raise InputError(f"Method '{empty[0]}' has no predictions.")
    if len(methods) < 2:
        raise InputError(f"A comparison needs two methods or more; got {len(methods)}.")
    if against is None:
        return list(combinations(methods, 2))
    if against not in methods:
        raise UnknownNameError.with_suggestions("method", against, methods, see=", ".join(methods))
    return [(name, against) for name in methods if name != against]


def _ranked_methods(
    logits: Mapping[str, Sequence[Floats]], column: LabelledUnits, resamples: Resamples
) -> dict[str, _MethodAuc]:
    """Rank the units by every method, as they are and in every resample."""
    draws = {name: np.zeros(len(resamples)) for name in logits}
    for rows, of_all_units in resamples.blocks():
        weights = of_all_units[:, column.place]
        for name, seeds in logits.items():
            of_seeds = [column.kind.compute_resampled_scores(weights, column.truth, each) for each in seeds]
            draws[name][rows] = np.mean(of_seeds, axis=0)
    found = {}
    for name, seeds in logits.items():
        values = [column.kind.compute_score(column.truth, each) for each in seeds]
        defined = [value for value in values if value is not None]
        value = sum(defined) / len(defined) if defined else None
        found[name] = _MethodAuc(value, draws[name], column.undefined_reason or column.no_interval_reason)
    return found


def _macro_of(ranked: Mapping[str, _MethodAuc]) -> _MethodAuc:
    """Average over the targets that have an AUC, in every resample too."""
    having = {target: each for target, each in ranked.items() if each.value is not None}
    if not having:
        return _MethodAuc(None, next(iter(ranked.values())).draws, "no target has an AUC")
    value = sum(each.value or 0.0 for each in having.values()) / len(having)
    reason = "; ".join(f"{target}: {each.reason}" for target, each in having.items() if each.reason)
    return _MethodAuc(value, np.mean([each.draws for each in having.values()], axis=0), reason)


def _tests_of(
    target: str,
    pairs: Sequence[tuple[str, str]],
    ranked: Mapping[str, _MethodAuc],
    delong: Mapping[tuple[str, str], tuple[float | None, str]],
) -> list[PairedComparison]:
    """Test every pair on one target, and correct for their number."""
    found = []
    for first, second in pairs:
        a, b = ranked[first], ranked[second]
        draws = a.draws - b.draws
        value = None if a.value is None or b.value is None else a.value - b.value
        p_bootstrap = None if a.reason or value is None else bootstrap_p_value(draws)
        p_delong, reason = delong.get((first, second), (None, "DeLong tests one target at a time"))
        difference = percentile_interval(value, draws, reason=a.reason)
        found.append(PairedComparison(first, second, target, difference, p_bootstrap, p_delong, None, reason))
    corrected = holm_correction([each.p_bootstrap if each.p_delong is None else each.p_delong for each in found])
    return [replace(each, p_holm=p) for each, p in zip(found, corrected, strict=True)]


def _delong_p(first: Sequence[Floats], second: Sequence[Floats], column: LabelledUnits) -> tuple[float | None, str]:
    """Test two methods by DeLong, or say why not."""
    if column.undefined_reason:
        return None, column.undefined_reason
    if len(first) > 1 or len(second) > 1:
        return None, "DeLong compares single models, not means over seeds"
    return column.kind.paired_test(column.truth, first[0], second[0], clustered=column.clustered)

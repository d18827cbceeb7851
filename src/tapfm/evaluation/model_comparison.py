"""Compare models on the same patients: AUC differences with paired confidence intervals and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from tapfm.errors import InputError, UnknownNameError
from tapfm.evaluation.alignment import SeedPredictions, align_predictions
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
    """AUC difference (first - second) of two models for one target, or for the mean of all targets ("macro")."""

    first: str
    second: str
    target: str
    difference: Estimate
    p_bootstrap: float | None
    p_delong: float | None
    p_holm: float | None  # corrected p_delong, or p_bootstrap if p_delong is None, over all pairs of the target
    reason: str = ""  # why p_delong is None


@dataclass(frozen=True)
class Comparison:
    """AUCs of several models on the same patients, and the differences of pairs of models."""

    models: tuple[str, ...]
    targets: tuple[str, ...]
    unit: Unit
    patient_count: int
    slide_count: int
    excluded: Mapping[str, tuple[str, ...]]  # by model, patients and slides that other models lack
    partial_labels: tuple[str, ...]  # units and targets that have a label in only some models; all models use it
    aucs: Mapping[tuple[str, str], Estimate]  # by model and target; with several targets also "macro"
    pairs: tuple[PairedComparison, ...]  # of each compared pair and target; with several targets also "macro"


@dataclass(frozen=True)
class _ModelAuc:
    """AUC of a model, as the mean over its seeds, and its value in every resample."""

    value: float | None
    resampled: Floats
    reason: str = ""  # why there is no value or no confidence interval

    def estimate(self) -> Estimate:
        """Return the AUC with its confidence interval."""
        return percentile_interval(self.value, self.resampled, reason=self.reason)


def compare_models(
    models: Mapping[str, SeedPredictions],
    targets: TargetKinds,
    unit: Unit,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    against: str | None = None,
) -> Comparison:
    """Compare the AUCs of models on the patients that all of them have.

    The AUC of a model with several seeds is the mean of their AUCs; patients are resampled, seeds are not.
    against: compare the other models with this one only, as the second of each pair.
    """
    pairs = _list_pairs(models, against)
    aligned = align_predictions(models, targets, unit)
    labelled = {target: select_labelled_units(aligned.units, target, kind, unit) for target, kind in targets.items()}
    logits = {
        target: {name: [units.select_logits(each) for each in seeds] for name, seeds in aligned.seeds.items()}
        for target, units in labelled.items()
    }

    def compute_target_aucs(target: str, strata: TargetKinds) -> dict[str, _ModelAuc]:
        drawn = resample_patients(aligned.units, strata, resamples=resamples, seed=seed)
        return _compute_aucs(logits[target], labelled[target], drawn)

    aucs: dict[tuple[str, str], Estimate] = {}
    tested: list[PairedComparison] = []
    by_target: dict[str, dict[str, _ModelAuc]] = {}
    for target, units in labelled.items():
        by_target[target] = compute_target_aucs(target, {target: targets[target]})
        by_model = logits[target]
        delong = {pair: _delong_test(by_model[pair[0]], by_model[pair[1]], units, unit) for pair in pairs}
        tested += _test_pairs(target, pairs, by_target[target], delong)
    if len(targets) > 1:
        joint = {target: compute_target_aucs(target, targets) for target in targets}  # the same resamples
        by_target[MACRO] = {name: _average_targets({t: joint[t][name] for t in targets}) for name in models}
        tested += _test_pairs(MACRO, pairs, by_target[MACRO], {})
    for target, model_aucs in by_target.items():
        aucs |= {(name, target): each.estimate() for name, each in model_aucs.items()}
    return Comparison(
        models=tuple(models),
        targets=tuple(targets),
        unit=unit,
        patient_count=aligned.patient_count,
        slide_count=aligned.slide_count,
        excluded=aligned.excluded,
        partial_labels=aligned.partial_labels,
        aucs=aucs,
        pairs=tuple(tested),
    )


def _list_pairs(models: Mapping[str, SeedPredictions], against: str | None) -> list[tuple[str, str]]:
    """Return the pairs to test, in the order of the models."""
    if empty := [name for name, seeds in models.items() if not seeds]:
        raise InputError(f"Model '{empty[0]}' has no predictions.")
    if len(models) < 2:
        raise InputError(f"A comparison needs at least two models; got {len(models)}.")
    if against is None:
        return list(combinations(models, 2))
    if against not in models:
        raise UnknownNameError.with_suggestions("model", against, models, see=", ".join(models))
    return [(name, against) for name in models if name != against]


def _compute_aucs(
    logits: Mapping[str, Sequence[Floats]], units: LabelledUnits, resamples: Resamples
) -> dict[str, _ModelAuc]:
    """Return the AUC of each model, and its values in the resamples.

    logits: for each model, the logits of each seed.
    """
    resampled = {name: np.zeros(len(resamples)) for name in logits}
    for rows, unit_weights in resamples.blocks():
        weights = unit_weights[:, units.indices]
        for name, seeds in logits.items():
            scores = [units.kind.compute_resampled_scores(weights, units.truth, each) for each in seeds]
            resampled[name][rows] = np.mean(scores, axis=0)
    found = {}
    for name, seeds in logits.items():
        values = [units.kind.compute_score(units.truth, each) for each in seeds]
        defined = [value for value in values if value is not None]
        value = sum(defined) / len(defined) if defined else None
        found[name] = _ModelAuc(value, resampled[name], units.undefined_reason or units.no_interval_reason)
    return found


def _average_targets(aucs: Mapping[str, _ModelAuc]) -> _ModelAuc:
    """Return the mean over the targets that have an AUC, also in every resample."""
    defined = {target: each for target, each in aucs.items() if each.value is not None}
    if not defined:
        return _ModelAuc(None, next(iter(aucs.values())).resampled, "no target has an AUC")
    value = sum(each.value or 0.0 for each in defined.values()) / len(defined)
    reason = "; ".join(f"{each.reason} ({target})" for target, each in defined.items() if each.reason)
    return _ModelAuc(value, np.mean([each.resampled for each in defined.values()], axis=0), reason)


def _test_pairs(
    target: str,
    pairs: Sequence[tuple[str, str]],
    aucs: Mapping[str, _ModelAuc],
    delong: Mapping[tuple[str, str], tuple[float | None, str]],
) -> list[PairedComparison]:
    """Test every pair for one target, with Holm's correction."""
    found = []
    for first, second in pairs:
        a, b = aucs[first], aucs[second]
        resampled = a.resampled - b.resampled
        value = None if a.value is None or b.value is None else a.value - b.value
        p_bootstrap = None if a.reason or value is None else bootstrap_p_value(resampled)
        p_delong, reason = delong.get((first, second), (None, "DeLong's test is for a single target, not for a mean"))
        difference = percentile_interval(value, resampled, reason=a.reason)
        found.append(PairedComparison(first, second, target, difference, p_bootstrap, p_delong, None, reason))
    corrected = holm_correction([each.p_bootstrap if each.p_delong is None else each.p_delong for each in found])
    return [replace(each, p_holm=p) for each, p in zip(found, corrected, strict=True)]


def _delong_test(
    first: Sequence[Floats], second: Sequence[Floats], units: LabelledUnits, unit: Unit
) -> tuple[float | None, str]:
    """Return the p value of DeLong's test, or None and the reason.

    first, second: the logits of each seed of two models.
    """
    if units.undefined_reason:
        return None, units.undefined_reason
    if len(first) > 1 or len(second) > 1:
        return None, "DeLong's test is for single models, not for means over seeds"
    return units.kind.paired_test(units.truth, first[0], second[0], unit=unit, clustered=units.clustered)

"""Bootstrap over patients: resamples of patients with replacement, shared by all metrics and models.

Patients are resampled instead of slides, because slides of one patient are correlated. Resampling is stratified by
label. Methods that are measured on the same resamples are paired, so a difference has its own confidence interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapfm.errors import SettingError
from tapfm.metrics.arrays import Floats
from tapfm.results.estimate import Estimate
from tapfm.runtime.seeding import make_rng

RESAMPLES = 2000
_SMALL_STRATUM = 5  # patients; smaller strata are merged
_MIN_DEFINED_FRACTION = 0.9  # of resamples in which a metric must be defined to compute an interval or a p value
_BLOCK_SIZE = 2_000_000  # weights per block: 16 MB

UNLABELLED = "None"
Pattern = tuple[str, ...]  # the stratum of a patient's label of each target, or UNLABELLED


@dataclass(frozen=True)
class Resamples:
    """How often each patient is in each resample, and the patient of each unit (slide or patient)."""

    counts: NDArray[np.uint16]  # resamples x patients
    patient_index: NDArray[np.intp]  # for each unit, the column of its patient in `counts`

    def __len__(self) -> int:
        return len(self.counts)

    def blocks(self) -> Iterator[tuple[slice, Floats]]:
        """Yield blocks of rows, and the weight of each unit (column) in these resamples (rows)."""
        step = max(1, _BLOCK_SIZE // max(1, len(self.patient_index)))
        for start in range(0, len(self.counts), step):
            rows = slice(start, start + step)
            yield rows, self.counts[rows].astype(np.float64)[:, self.patient_index]


def draw_resamples(
    patient_index: NDArray[np.intp], patterns: Sequence[Pattern], *, resamples: int = RESAMPLES, seed: int = 0
) -> Resamples:
    """Resample patients within strata of their labels.

    patterns: for each patient, the label stratum of every target.
    """
    if resamples < 1:
        raise SettingError(f"resamples must be at least 1; got {resamples}.")
    counts = np.zeros((resamples, len(patterns)), dtype=np.uint16)
    for name, members in _strata(patterns).items():
        drawn = make_rng(seed, "patient bootstrap", name).integers(len(members), size=(resamples, len(members)))
        flat = drawn + np.arange(resamples)[:, None] * len(members)
        counted = np.bincount(flat.ravel(), minlength=flat.size).reshape(flat.shape)
        counts[:, members] = counted
    return Resamples(counts, patient_index)


def _strata(patterns: Sequence[Pattern]) -> dict[str, list[int]]:
    """Return the indices of patients by stratum: by the labels of all targets, or by the rarest label in small strata.

    A patient who is alone in a stratum is in every resample exactly once. With several targets this would apply to most
    positives of a rare target, and its confidence interval would be far too narrow. Therefore all patterns with the
    same rarest label are merged if one of them is small, and strata that are still small are merged into one. With a
    single target, the number of patients per class is the same in all resamples.
    """
    frequency = Counter(label for pattern in patterns for label in enumerate(pattern))
    rarest = {
        pattern: min(
            (label for label in enumerate(pattern) if label[1] != UNLABELLED),
            key=lambda label: (frequency[label], label[0]),
            default=None,
        )
        for pattern in patterns
    }
    sizes = Counter(patterns)
    merged = {rarest[pattern] for pattern, size in sizes.items() if size < _SMALL_STRATUM}
    groups: dict[str, list[int]] = {}  # patients by stratum name; the name is part of the random seed
    for number, pattern in enumerate(patterns):
        label = rarest[pattern]
        if label in merged:
            name = "rarest None" if label is None else f"rarest ({label[0]}, {label[1]})"
        else:
            name = f"all ({', '.join(pattern)}{',' * (len(pattern) == 1)})"
        groups.setdefault(name, []).append(number)
    small = [name for name, members in groups.items() if len(members) < _SMALL_STRATUM]
    if len(small) > 1 and len(patterns[0]) > 1:
        groups["rest"] = sorted(number for name in small for number in groups.pop(name))
    return groups


def percentile_interval(value: float | None, resampled: Floats, level: float = 0.95, reason: str = "") -> Estimate:
    """Return a value with the percentile interval of its resampled values, which are NaN if a resample has no value.

    The interval is widened to include the value, because resampling shifts some metrics (ECE). There is no interval if
    all resampled values are equal, for example with an AUC of 1.
    reason: why there is no value or no interval, if already known.
    """
    if value is None or reason:
        return Estimate(value, reason=reason)
    defined = resampled[~np.isnan(resampled)]
    undefined = len(resampled) - len(defined)
    if len(defined) < _MIN_DEFINED_FRACTION * len(resampled):
        reason = f"no confidence interval: the metric is undefined in {undefined:,} of {len(resampled):,} resamples"
        return Estimate(value, reason=reason)
    if np.ptp(defined) <= 1e-12:
        return Estimate(value, reason="no confidence interval: all resamples give the same value")
    low, high = (float(edge) for edge in np.quantile(defined, [(1 - level) / 2, (1 + level) / 2]))
    reason = ""
    if undefined:
        reason = f"{undefined:,} of {len(resampled):,} resamples excluded, because the metric is undefined in them"
    return Estimate(value, min(low, value), max(high, value), reason)


def bootstrap_p_value(resampled: Floats) -> float | None:
    """Return the two-sided p value of a resampled difference, from the number of resamples at or beyond 0."""
    defined = resampled[~np.isnan(resampled)]
    if len(defined) < _MIN_DEFINED_FRACTION * len(resampled):
        return None
    # differences below 1e-12 are rounding errors
    below, above = int((defined <= 1e-12).sum()), int((defined >= -1e-12).sum())
    return min(1.0, 2 * (min(below, above) + 1) / (len(defined) + 1))

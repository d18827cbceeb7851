"""The patient bootstrap: patients drawn again with replacement, one set of draws for every metric and method.

Patients rather than slides, since slides of a patient are alike; each stratum of labels keeps its size. All that is
measured on the same draws is paired, so that a difference has its own interval.
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
from tapfm.runtime.seeding import rng_for

RESAMPLES = 2000
_SMALL_STRATUM = 5  # patients; a pattern of labels with fewer is merged
_SHARE_NEEDED = 0.9  # of resamples with a value; with fewer their spread says little of it
_BLOCK = 2_000_000  # numbers at a time: 16 MB for each array of weights

UNLABELLED = "None"
Pattern = tuple[str, ...]  # the stratum of a patient's label of each target, or UNLABELLED


@dataclass(frozen=True)
class Resamples:
    """How often each patient is drawn in each resample, and whose every unit is."""

    counts: NDArray[np.uint16]  # resamples x patients
    patient_of_unit: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.counts)

    def blocks(self) -> Iterator[tuple[slice, Floats]]:
        """Give the weights of units, some resamples at a time: how often each unit counts."""
        step = max(1, _BLOCK // max(1, len(self.patient_of_unit)))
        for start in range(0, len(self.counts), step):
            rows = slice(start, start + step)
            yield rows, self.counts[rows].astype(np.float64)[:, self.patient_of_unit]


def draw_resamples(
    patient_of_unit: NDArray[np.intp], patterns: Sequence[Pattern], *, resamples: int = RESAMPLES, seed: int = 0
) -> Resamples:
    """Draw patients within strata of their labels, which `patterns` has for each patient."""
    if resamples < 1:
        raise SettingError(f"resamples must be at least 1; got {resamples}.")
    counts = np.zeros((resamples, len(patterns)), dtype=np.uint16)
    for name, members in _strata(patterns).items():
        drawn = rng_for(seed, "patient bootstrap", name).integers(len(members), size=(resamples, len(members)))
        flat = drawn + np.arange(resamples)[:, None] * len(members)
        counted = np.bincount(flat.ravel(), minlength=flat.size).reshape(flat.shape)
        counts[:, members] = counted
    return Resamples(counts, patient_of_unit)


def _strata(patterns: Sequence[Pattern]) -> dict[str, list[int]]:
    """Group patients by all their labels, and where that leaves very few by the rarest one.

    A patient alone in a stratum is in every resample once, as if nothing were left to chance: with several targets
    most positives of a rare one would be, and its interval far too narrow. So patterns that share their rarest label
    form one stratum as soon as one of them is small; those that are small even then form one together. The classes of
    a single target keep their sizes in any case.
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
    groups: dict[str, list[int]] = {}
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


def interval(value: float | None, draws: Floats, level: float = 0.95, why: str = "") -> Estimate:
    """Take the percentile interval of resampled values, NaN where a resample has none.

    It is widened to hold the value itself, which a metric that resampling shifts (ECE) may leave. Where resamples are
    all alike (every positive found, an AUC of 1) their spread says nothing, and there is no interval.
    """
    if value is None or why:
        return Estimate(value, why=why)
    defined = draws[~np.isnan(draws)]
    left_out = len(draws) - len(defined)
    note = f"{left_out} of {len(draws)} resamples without a value left out" if left_out else ""
    if len(defined) < _SHARE_NEEDED * len(draws):
        return Estimate(value, why=f"no interval: {left_out} of {len(draws)} resamples have no value")
    if np.ptp(defined) <= 1e-12:
        return Estimate(value, why="no interval: all resamples give the same value")
    low, high = (float(edge) for edge in np.quantile(defined, [(1 - level) / 2, (1 + level) / 2]))
    return Estimate(value, min(low, value), max(high, value), note)


def two_sided_p(draws: Floats) -> float | None:
    """Test a difference against 0: twice the smaller share of resamples on either side, counting one more on each."""
    defined = draws[~np.isnan(draws)]
    if len(defined) < _SHARE_NEEDED * len(draws):
        return None
    # what rounding leaves of equal means is no difference
    below, above = int((defined <= 1e-12).sum()), int((defined >= -1e-12).sum())
    return min(1.0, 2 * (min(below, above) + 1) / (len(defined) + 1))

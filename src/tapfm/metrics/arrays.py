"""Labels and scores as arrays, without those whose label is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tapfm.errors import NonFiniteError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def known_of(labels: Sequence[int | None], scores: Sequence[float]) -> tuple[Flags, Floats]:
    """Give who is positive and every score, of those with a label; a score that is no number is refused."""
    known = [(label, score) for label, score in zip(labels, scores, strict=True) if label is not None]
    positive = np.array([label == 1 for label, _ in known], dtype=bool)
    values = np.array([score for _, score in known], dtype=np.float64)
    if np.isnan(values).any():
        raise NonFiniteError(
            f"{int(np.isnan(values).sum())} of {len(values)} scores are not a number.",
            hint="A model that gives such scores cannot be ranked: look at its loss during training.",
        )
    return positive, values


def sigmoid(logit: float) -> float:
    """Turn a logit into a probability, without overflow."""
    small = math.exp(-abs(logit))
    return 1 / (1 + small) if logit >= 0 else small / (1 + small)

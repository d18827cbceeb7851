"""Array types of the metrics, and a check of their inputs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tapfm.errors import NonFiniteError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def check_scores(positive: Flags, scores: Floats) -> None:
    """Raise ValueError if labels and scores differ in shape, NonFiniteError if a score is NaN."""
    if positive.shape != scores.shape:
        raise ValueError(f"Labels and scores must have the same shape; got {positive.shape} and {scores.shape}.")
    if np.isnan(scores).any():
        raise NonFiniteError(
            f"{int(np.isnan(scores).sum())} of {len(scores)} scores are NaN.",
            hint="Metrics cannot be computed from NaN. Check whether the training loss of this model diverged.",
        )

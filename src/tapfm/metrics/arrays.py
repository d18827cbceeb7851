"""The arrays that metrics take, and their check."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tapfm.errors import NonFiniteError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def check_scores(positive: Flags, scores: Floats) -> None:
    """Refuse scores that are not one for each label, or not a number."""
    if positive.shape != scores.shape:
        raise ValueError(f"A score is needed for each label; got {positive.shape} labels and {scores.shape} scores.")
    if np.isnan(scores).any():
        raise NonFiniteError(
            f"{int(np.isnan(scores).sum())} of {len(scores)} scores are not a number.",
            hint="A model that gives such scores cannot be ranked: look at its loss during training.",
        )

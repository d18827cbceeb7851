"""How well scores put positives above negatives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapfm.errors import NonFiniteError


def auc(labels: Sequence[int | None], scores: Sequence[float]) -> float | None:
    """Compute the area under the ROC curve: how often a positive scores above a negative, a tie counting half.

    Missing labels (None) take no part; where a class is absent it is None, and `why_undefined` says why.
    """
    known = [(label, score) for label, score in zip(labels, scores, strict=True) if label is not None]
    positive = np.array([label == 1 for label, _ in known], dtype=bool)
    values = np.array([score for _, score in known], dtype=np.float64)
    if np.isnan(values).any():
        raise NonFiniteError(
            f"{int(np.isnan(values).sum())} of {len(values)} scores are not a number.",
            hint="A model that gives such scores cannot be ranked: look at its loss during training.",
        )
    positives = int(positive.sum())
    negatives = len(known) - positives
    if not positives or not negatives:
        return None
    _, place, ties = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]  # of equal scores the mean rank, which counts a tie half
    pairs_in_order = ranks[positive].sum() - positives * (positives + 1) / 2
    return float(pairs_in_order / (positives * negatives))


def why_undefined(labels: Sequence[int | None], unit: str = "slide") -> str:
    """Say why there is no AUC, for example "no positive slide among 12"; nothing where there is one."""
    known = [label for label in labels if label is not None]
    if not known:
        return f"no labelled {unit} among {len(labels)}"
    if 1 not in known:
        return f"no positive {unit} among {len(known)}"
    if 0 not in known:
        return f"no negative {unit} among {len(known)}"
    return ""

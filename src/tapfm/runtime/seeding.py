"""Random generators seeded by a key, so that results do not depend on the order of calls or on the process."""

from __future__ import annotations

import hashlib

import numpy as np


def make_rng(*key: int | str) -> np.random.Generator:
    """Return the random generator of a key, for example (seed, "slide-007", "nuclei")."""
    # lengths distinguish ("ab", "c") from ("a", "bc"), types distinguish 1 from "1"
    text = "".join(f"{type(part).__name__}{len(str(part))}:{part}" for part in key)
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest(), "big"))

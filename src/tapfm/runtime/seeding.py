"""Randomness has an address: the same words give the same draws, in any order and in any process."""

from __future__ import annotations

import hashlib

import numpy as np


def rng_for(*address: int | str) -> np.random.Generator:
    """Make the generator that belongs to an address, for example (seed, "slide-007", "nuclei")."""
    # the length keeps ("ab", "c") apart from ("a", "bc"), the type keeps 1 apart from "1"
    text = "".join(f"{type(part).__name__}{len(str(part))}:{part}" for part in address)
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest(), "big"))

"""Sampling of the tiles of a slide for an epoch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tapfm.errors import SettingError
from tapfm.runtime.seeding import make_rng


def sample_tiles(count: int, tiles_per_slide: int | None, *rng_key: int | str) -> NDArray[np.int64]:
    """Return the sorted indices of `tiles_per_slide` tiles, sampled without replacement.

    All tiles are returned if `tiles_per_slide` is None or not smaller than `count`. rng_key: selects the random stream,
    for example (seed, epoch, slide_id).
    """
    if tiles_per_slide is not None and tiles_per_slide < 1:
        raise SettingError(
            f"tiles_per_slide is {tiles_per_slide}, but must be at least 1.", hint="Omit it to use all tiles."
        )
    if tiles_per_slide is None or count <= tiles_per_slide:
        return np.arange(count, dtype=np.int64)
    sampled = make_rng(*rng_key, "tiles").choice(count, tiles_per_slide, replace=False, shuffle=False)
    return np.sort(sampled)  # in grid order, because neighbouring tiles share decoded blocks

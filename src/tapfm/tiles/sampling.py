"""Which tiles of a slide an epoch sees."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tapfm.errors import SettingError
from tapfm.runtime.seeding import rng_for


def draw_tiles(count: int, tiles_per_slide: int | None, *address: int | str) -> NDArray[np.int64]:
    """Draw tiles without replacement, for an address such as (seed, epoch, slide_id); None, or too few: all of them."""
    if tiles_per_slide is not None and tiles_per_slide < 1:
        raise SettingError(
            f"tiles_per_slide is {tiles_per_slide}: it has to be at least 1.", hint="Leave it out to take every tile."
        )
    if tiles_per_slide is None or count <= tiles_per_slide:
        return np.arange(count, dtype=np.int64)
    drawn = rng_for(*address, "tiles").choice(count, tiles_per_slide, replace=False, shuffle=False)
    return np.sort(drawn)  # in the order of the grid, where neighbours share decoded blocks

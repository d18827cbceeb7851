"""Where the bags of a list of slides come from: pixels of their tiles, or stored features."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tapfm.inference.bags import AHEAD_BYTES, Bags, FeatureBags, PixelBags, SlideTiles
from tapfm.runs.data import RunSlide
from tapfm.runtime.workers import WorkerPool
from tapfm.tiles.stream import PIECE


def make_bags(
    slides: Sequence[RunSlide],
    *,
    tile_px: int | None,
    device: torch.device,
    workers: int,
    ahead_bytes: int = AHEAD_BYTES,
    pool: WorkerPool | None = None,
) -> Bags:
    """Return bags of pixels for an encoder that takes tiles of `tile_px`, or of stored features (None)."""
    if tile_px is None:
        files = {slide.row.slide_id: slide.features.path for slide in slides if slide.features is not None}
        return FeatureBags(files, device=device, ahead_bytes=ahead_bytes)
    tiles = slide_tiles(slides)
    pieces = -(-sum(len(each.tiles) for each in tiles.values()) // PIECE)
    return PixelBags(
        tiles, tile_px=tile_px, device=device, workers=min(workers, pieces), ahead_bytes=ahead_bytes, pool=pool
    )


def slide_tiles(slides: Sequence[RunSlide]) -> dict[str, SlideTiles]:
    """Return the files and tiles of slides, by id."""
    return {slide.row.slide_id: SlideTiles(slide.row.path, slide.tiles) for slide in slides if slide.tiles is not None}

"""Create the bags of a list of slides, from the pixels of their tiles or from stored features."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tapfm.inference.bags import PREFETCH_BYTES, Bags, FeatureBags, PixelBags, SlideTiles
from tapfm.runs.data import RunSlide
from tapfm.runtime.workers import WorkerPool
from tapfm.tiles.stream import TILES_PER_PART


def make_bags(
    slides: Sequence[RunSlide],
    *,
    tile_px: int | None,
    device: torch.device,
    workers: int,
    prefetch_bytes: int = PREFETCH_BYTES,
    pool: WorkerPool | None = None,
) -> Bags:
    """Return bags of pixels, resized to `tile_px` for the encoder, or of stored features if `tile_px` is None."""
    if tile_px is None:
        files = {slide.row.slide_id: slide.features.path for slide in slides if slide.features is not None}
        return FeatureBags(files, device=device, prefetch_bytes=prefetch_bytes)
    tiles = collect_slide_tiles(slides)
    pieces = -(-sum(len(each.tiles) for each in tiles.values()) // TILES_PER_PART)
    return PixelBags(
        tiles, tile_px=tile_px, device=device, workers=min(workers, pieces), prefetch_bytes=prefetch_bytes, pool=pool
    )


def collect_slide_tiles(slides: Sequence[RunSlide]) -> dict[str, SlideTiles]:
    return {slide.row.slide_id: SlideTiles(slide.row.path, slide.tiles) for slide in slides if slide.tiles is not None}

"""Tile one slide: remove tiles of background, padding, pen marks, blur and edges; count the removed tiles by reason."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tapfm.errors import NoTilesError, ScaleError, TileReadError
from tapfm.slides.annotations import read_tissue_annotation
from tapfm.slides.opening import open_strict_reader
from tapfm.slides.quality import FOCUS_MPP, detect_blur, detect_pen
from tapfm.slides.region_reading import BLOCK_PX, MAX_UNREADABLE_FRACTION, best_level, make_thumbnail, read_region
from tapfm.slides.scale import Scale
from tapfm.slides.slide import DAMAGED_FILE_HINT, Box, Pixels, Slide, SlideMetadata, Thumbnail
from tapfm.slides.tissue import Mask, detect_padding, detect_tissue, tissue_thumbnail_px
from tapfm.tiles.grid import Positions, TileSpec, TileStatus, find_edge_tiles, mask_coverage, tile_grid

# Version of the tiles. Increase it when the same settings give different tiles on any slide (readers, scale, tissue,
# grid, filters). Slides tiled by an older version are then tiled again. tests/versions/ fails if the output changes and
# this version does not.
TILING_VERSION = 1

_MAX_PEN_FRACTION = 0.05  # of a tile; a model could use more ink as a shortcut
_MIN_PADDING_FRACTION = 0.5  # a tile with too little tissue and more padding than this is counted as padding
_MAX_ENLARGEMENT = 4  # a larger factor means that the scale is wrong
# At least this many tiles (all, if there are fewer) are read at full resolution to check that a slide is readable.
_MIN_CHECKED_TILES = 64
_BLOCK_TILES = 8  # blocks of up to 8 x 8 tiles are read as one image to measure the sharpness of each tile
_MIN_BLOCK_FILL_FRACTION = 0.25  # of a block that its tiles fill; with less, the tiles are read one by one
_MAX_THREADS = 4  # for reading; more threads would wait for the GIL
_MIN_FOCUS_PX = 8  # sides of the part of an edge tile whose sharpness is measured; it is read at FOCUS_MPP
_SUSPICIOUS_REMOVAL = 0.5  # a filter that removes more than this fraction of the tissue tiles gives a warning


@dataclass(frozen=True)
class TiledSlide:
    """The tile grid of a slide, with a status for each position."""

    positions: Positions
    statuses: NDArray[np.uint8]
    side_px0: int
    tissue_mask: Mask  # without pen marks; with the shape of the thumbnail
    thumbnail: Thumbnail
    tissue_mm2: float
    removed_edge_mm2: float  # tissue of the tiles removed at the edge that is in no other tile of the grid
    warnings: tuple[str, ...]

    @property
    def kept(self) -> Positions:
        """Positions of the tiles that are kept, padded tiles included."""
        return self.positions[self._is_kept]

    @property
    def padded(self) -> NDArray[np.bool_]:
        """Which of the tiles that are kept are padded."""
        return np.asarray(self.statuses[self._is_kept] == TileStatus.PADDED)

    @property
    def _is_kept(self) -> NDArray[np.bool_]:
        return np.isin(self.statuses, (TileStatus.KEPT, TileStatus.PADDED))

    @property
    def counts(self) -> dict[TileStatus, int]:
        """Number of positions with each status."""
        counter = Counter(self.statuses.tolist())
        return {status: counter[status] for status in TileStatus}


def tile_slide(
    slide: Slide, scale: Scale, spec: TileSpec, tissue_path: Path | None = None, threads: int = 1
) -> TiledSlide:
    """Compute the tiles of a slide.

    tissue_path: a tissue annotation (GeoJSON file or mask image), used instead of tissue detection.
    """
    metadata, mpp = slide.metadata, scale.mpp
    side_px0 = spec.side_px0(mpp)
    if side_px0 * _MAX_ENLARGEMENT < spec.tile_px:
        raise ScaleError(
            f"{metadata.path.name} is too coarse: it has {mpp:g} um per pixel, so a tile of {spec.tile_px} px at "
            f"{spec.mpp:g} um per pixel would be enlarged from {side_px0} px.",
            hint="If the scale is wrong, enter the correct one in the column `mpp` of the cohort table (um per pixel, "
            f"0.25 at 40x). If it is correct, extract coarser tiles: --mpp {math.ceil(mpp * 10) / 10:g}",
        )
    # one thread with OpenSlide: after an error its handle fails on every call, also for tiles of other threads
    threads = min(threads, _MAX_THREADS) if metadata.reader == "tiff" else 1
    longest_px = tissue_thumbnail_px(max(metadata.bounds.width_px0, metadata.bounds.height_px0), mpp)
    thumbnail = make_thumbnail(slide, longest_px, threads)
    thumbnail_mpp = mpp * sum(thumbnail.downsample) / 2
    if tissue_path is None:
        # only formats of OpenSlide have areas that were not scanned; in others, white is glass
        unscanned = metadata.background if metadata.reader == "openslide" else None
        tissue = detect_tissue(thumbnail.pixels, thumbnail_mpp, spec.tissue, unscanned)
    else:
        tissue = read_tissue_annotation(tissue_path, metadata, thumbnail)
    pen = detect_pen(thumbnail.pixels, thumbnail_mpp) if spec.drop_pen else np.zeros_like(tissue)

    min_tissue = spec.min_tissue - 1e-9  # tolerance for rounding
    positions = tile_grid(metadata.bounds, spec, mpp, with_edge=True)
    on_tissue = mask_coverage(tissue, thumbnail, positions, side_px0) >= min_tissue
    at_edge = find_edge_tiles(metadata.bounds, positions, side_px0)
    if spec.edge_tiles == "skip":  # edge tiles without tissue are not counted
        counted = on_tissue | ~at_edge
        positions, on_tissue, at_edge = positions[counted], on_tissue[counted], at_edge[counted]

    def coverage(mask: Mask) -> NDArray[np.float64]:
        return mask_coverage(mask, thumbnail, positions, side_px0)

    on_pen = on_tissue & ((coverage(pen) > _MAX_PEN_FRACTION) | (coverage(tissue & ~pen) < min_tissue))
    statuses = np.full(len(positions), TileStatus.KEPT, np.uint8)
    statuses[~on_tissue] = TileStatus.BACKGROUND
    statuses[~on_tissue & (coverage(detect_padding(thumbnail.pixels)) > _MIN_PADDING_FRACTION)] = TileStatus.PADDING
    statuses[on_pen] = TileStatus.PEN
    if spec.edge_tiles == "skip":
        statuses[at_edge] = TileStatus.EDGE
    warnings = list(scale.warnings)
    with open_strict_reader(slide) as reader, ThreadPoolExecutor(1) as executor:
        kept = np.flatnonzero(statuses == TileStatus.KEPT)
        sampled = kept[:: max(1, len(kept) // _MIN_CHECKED_TILES)]
        check = executor.submit(_find_unreadable, reader, positions, sampled, side_px0, spec.tile_px)
        if reader is slide:
            check.result()  # wait: an error on a shared handle would also fail the tiles read below
        if spec.drop_blur and mpp <= FOCUS_MPP:
            _mark_blurred_tiles(slide, positions, statuses, side_px0, mpp, threads)
        _mark_unreadable_tiles(reader, positions, statuses, side_px0, spec.tile_px, sampled, check.result())
    statuses[(statuses == TileStatus.KEPT) & at_edge] = TileStatus.PADDED
    if side_px0 < spec.tile_px:
        warnings.append(f"{mpp:.4g} um per pixel is coarser than the requested {spec.mpp:g}; tiles are enlarged")
    warnings += _removal_warnings(statuses)
    tissue = tissue & ~pen
    removed_at_edge = tissue & _find_removed_edge(thumbnail, positions, statuses == TileStatus.EDGE, side_px0)
    tissue_mm2, removed_edge_mm2 = (float(each.sum()) * thumbnail_mpp**2 / 1e6 for each in (tissue, removed_at_edge))
    return TiledSlide(positions, statuses, side_px0, tissue, thumbnail, tissue_mm2, removed_edge_mm2, tuple(warnings))


def _find_removed_edge(thumbnail: Thumbnail, positions: Positions, removed: Mask, side_px0: int) -> Mask:
    """Return a mask of the thumbnail pixels in the removed edge tiles, without those in other tiles of the grid."""
    mask = np.zeros(thumbnail.pixels.shape[:2], bool)
    corner, step = (thumbnail.box.x_px0, thumbnail.box.y_px0), thumbnail.downsample
    starts = np.rint((positions - corner) / step).astype(int)
    ends = np.rint((positions + side_px0 - corner) / step).astype(int)
    for (left, top), (right, bottom) in zip(starts[removed].tolist(), ends[removed].tolist(), strict=True):
        mask[top:bottom, left:right] = True
    if not removed.all():
        right, bottom = ends[~removed].max(axis=0).tolist()
        mask[:bottom, :right] = False
    return mask


def _mark_blurred_tiles(
    slide: Slide, positions: Positions, statuses: NDArray[np.uint8], side_px0: int, mpp: float, threads: int = 1
) -> None:
    """Read the kept tiles at low resolution; mark those that are out of focus or cannot be read."""
    focus_px = max(8, round(side_px0 * mpp / FOCUS_MPP))
    kept = np.flatnonzero(statuses == TileStatus.KEPT)

    def mark_block(block: NDArray[np.intp]) -> None:
        tiles = _read_block(slide, positions[block], side_px0, focus_px)
        if tiles is None:
            results = [_read_or_none(slide, x, y, side_px0, focus_px) for x, y in positions[block].tolist()]
            unreadable = np.array([tile is None for tile in results])
            statuses[block[unreadable]] = TileStatus.UNREADABLE
            block, tiles = block[~unreadable], np.array([tile for tile in results if tile is not None])
        if len(block):
            statuses[block[detect_blur(tiles)]] = TileStatus.BLUR

    def mark_edge_tile(tile: int) -> None:
        x_px0, y_px0 = positions[tile].tolist()
        pixels = _read_or_none(slide, x_px0, y_px0, side_px0, focus_px)
        if pixels is None:
            statuses[tile] = TileStatus.UNREADABLE
            return
        inside = _crop_to_bounds(pixels, positions[tile], side_px0, slide.metadata.bounds)
        if min(inside.shape[:2]) >= _MIN_FOCUS_PX and detect_blur(inside[np.newaxis])[0]:
            statuses[tile] = TileStatus.BLUR

    at_edge = find_edge_tiles(slide.metadata.bounds, positions[kept], side_px0)
    blocks = _group_into_blocks(slide.metadata, positions, kept[~at_edge], side_px0, focus_px)
    with ThreadPoolExecutor(threads) as pool:  # decoding and resizing release the GIL
        list(pool.map(mark_block, blocks))
        list(pool.map(mark_edge_tile, kept[at_edge].tolist()))
    _check_damage(slide, statuses[kept])


def _crop_to_bounds(pixels: Pixels, position: NDArray[np.int64], side_px0: int, bounds: Box) -> Pixels:
    """Return the part of an edge tile within the bounds. The sharp border of the white part would look like focus.

    The last pixel inside is excluded, because resizing may have mixed it with the white part.
    """
    inside_px0 = (bounds.x_px0 + bounds.width_px0, bounds.y_px0 + bounds.height_px0) - position
    inside_px = inside_px0 * len(pixels) // side_px0 - 1
    width_px, height_px = np.where(inside_px0 < side_px0, inside_px, len(pixels)).tolist()
    return pixels[: max(height_px, 0), : max(width_px, 0)]


def _group_into_blocks(
    metadata: SlideMetadata, positions: Positions, chosen: NDArray[np.intp], side_px0: int, tile_px: int
) -> list[NDArray[np.intp]]:
    """Group neighbouring tiles into blocks, so that each part of the file is decoded and resized once."""
    level = metadata.levels[best_level(metadata.levels, side_px0 / tile_px)]
    block_tiles = min(_BLOCK_TILES, int(BLOCK_PX * level.downsample / side_px0))
    block_x, block_y = (positions[chosen] // (max(1, block_tiles) * side_px0)).T
    order = np.lexsort((block_x, block_y))
    ends = np.flatnonzero(np.diff(block_x[order]) | np.diff(block_y[order])) + 1
    return [block for block in np.split(chosen[order], ends) if len(block)]


def _read_block(slide: Slide, positions: Positions, side_px0: int, tile_px: int) -> Pixels | None:
    """Read neighbouring tiles as one image and crop them from it.

    Return None if the tiles fill too little of the image or if it cannot be decoded. Crops start at whole pixels of the
    image: adjacent tiles are exact, others are shifted by less than one pixel.
    """
    corner, step = positions.min(axis=0), side_px0 / tile_px
    span = positions.max(axis=0) + side_px0 - corner
    if len(positions) * side_px0**2 < _MIN_BLOCK_FILL_FRACTION * span.prod():
        return None
    size_px = (span / step + 1e-6).astype(int)
    try:
        image = read_region(slide, *corner.tolist(), *np.minimum(size_px * step, span).tolist(), *size_px.tolist())
    except TileReadError:
        return None
    starts = np.minimum(np.rint((positions - corner) / step).astype(int), size_px - tile_px)
    return np.stack([image[top : top + tile_px, left : left + tile_px] for left, top in starts.tolist()])


def _mark_unreadable_tiles(
    slide: Slide,
    positions: Positions,
    statuses: NDArray[np.uint8],
    side_px0: int,
    tile_px: int,
    sampled: NDArray[np.intp],
    unreadable_sampled: NDArray[np.intp],
) -> None:
    """Mark unreadable tiles. If a sampled tile is unreadable, all other tiles are read too.

    Tissue and focus are measured on coarse levels, but damage may affect only the finest one. Reading every tile of
    every slide at full resolution would take longer than the rest of the tiling.

    sampled: tiles that were already read at full resolution. unreadable_sampled: those that failed.
    """
    kept = np.flatnonzero(statuses == TileStatus.KEPT)
    if len(unreadable_sampled):
        others = _find_unreadable(slide, positions, np.setdiff1d(kept, sampled), side_px0, tile_px)
        statuses[np.intersect1d(kept, np.concatenate([unreadable_sampled, others]))] = TileStatus.UNREADABLE
    _check_damage(slide, statuses[kept])


def _find_unreadable(
    slide: Slide, positions: Positions, chosen: NDArray[np.intp], side_px0: int, tile_px: int
) -> NDArray[np.intp]:
    """Return the chosen tiles that cannot be decoded."""
    unreadable = [_read_or_none(slide, x, y, side_px0, tile_px) is None for x, y in positions[chosen].tolist()]
    return chosen[np.array(unreadable, bool)]


def _check_damage(slide: Slide, statuses: NDArray[np.uint8]) -> None:
    """Raise TileReadError if too many of the tiles with these statuses are unreadable."""
    unreadable = int((statuses == TileStatus.UNREADABLE).sum())
    if unreadable > MAX_UNREADABLE_FRACTION * len(statuses):
        raise TileReadError(
            f"{slide.metadata.path.name}: {unreadable:,} of {len(statuses):,} tiles cannot be decoded.",
            hint=DAMAGED_FILE_HINT,
        )


def _read_or_none(slide: Slide, x_px0: int, y_px0: int, side_px0: int, tile_px: int) -> Pixels | None:
    """Read a tile, with one retry because network drives can fail temporarily; None if it cannot be decoded."""
    for _ in range(2):
        try:
            return slide.read(x_px0, y_px0, side_px0, tile_px)
        except TileReadError:
            continue
    return None


def _removal_warnings(statuses: NDArray[np.uint8]) -> list[str]:
    """Return a warning for each filter that removed most of the tissue."""
    tissue = int((~np.isin(statuses, (TileStatus.BACKGROUND, TileStatus.PADDING, TileStatus.EDGE))).sum())
    return [
        f"the {name} filter removed {removed:,} of {tissue:,} tissue tiles; check its image in overlays/"
        for name, status in (("pen", TileStatus.PEN), ("blur", TileStatus.BLUR))
        if tissue and (removed := int((statuses == status).sum())) > _SUSPICIOUS_REMOVAL * tissue
    ]


def no_tiles_error(tiled: TiledSlide, slide_name: str, spec: TileSpec, tissue_path: Path | None = None) -> NoTilesError:
    """Return the error for a slide without tiles. tissue_path: as in `tile_slide`."""
    counts = tiled.counts
    if len(tiled.positions) == counts[TileStatus.EDGE]:
        box = tiled.thumbnail.box
        pad = " Or pad the slide with white: --edge-tiles pad" if counts[TileStatus.EDGE] else ""
        return NoTilesError(
            f"{slide_name} has {box.width_px0:,} x {box.height_px0:,} pixels and is smaller than one tile of "
            f"{tiled.side_px0:,} x {tiled.side_px0:,} pixels.",
            hint=f"Use smaller tiles: decrease --size or --mpp.{pad}",
        )
    reasons = {
        TileStatus.PEN: "with pen marks",
        TileStatus.BLUR: "out of focus",
        TileStatus.UNREADABLE: "unreadable",
        TileStatus.EDGE: "past the right or bottom edge",
    }
    removed = [f"{count:,} {reasons[status]}" for status, count in counts.items() if status in reasons and count]
    if removed:
        pad = " --edge-tiles pad keeps tiles that extend past the edge." if counts[TileStatus.EDGE] else ""
        return NoTilesError(
            f"{slide_name} has tissue, but all of its tiles were removed: {', '.join(removed)}.",
            hint=f"Check its image in overlays/. --keep-pen and --keep-blur disable the filters.{pad}",
        )
    advice = (
        "Try another --tissue method or a lower --min-tissue, or annotate the tissue and use --tissue-mask."
        if tissue_path is None
        else f"Try a lower --min-tissue, or correct the annotation {tissue_path}."
    )
    return NoTilesError(
        f"{slide_name} has no tissue: none of its {len(tiled.positions):,} tile positions consists of at least "
        f"{spec.min_tissue:.0%} tissue.",
        hint=f"Check its image in overlays/. {advice}",
    )

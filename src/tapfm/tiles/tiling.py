"""One slide's tiles: its grid, less glass, padding, ink and blur, with every removal counted."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tapfm.errors import NoTissueError, ScaleError, TileReadError
from tapfm.slides.annotations import read_tissue_annotation
from tapfm.slides.opening import strict_reader
from tapfm.slides.quality import FOCUS_MPP, detect_blur, pen_mask
from tapfm.slides.region_reading import BLOCK_PX, MAX_UNREADABLE_FRACTION, best_level, make_thumbnail, read_region
from tapfm.slides.scale import Scale
from tapfm.slides.slide import DAMAGED_FILE_HINT, Pixels, Slide, SlideMetadata, Thumbnail
from tapfm.slides.tissue import Mask, mask_side_px, padding_mask, tissue_mask
from tapfm.tiles.grid import Positions, TileSpec, TileStatus, mask_coverage, tile_grid

# Version of the tiles. Increase it when the same settings give other tiles on any slide (readers, scale, tissue, grid,
# filters); slides tiled by an older version are then tiled again. tests/versions/ fails when the output changes and
# this number does not.
TILING_VERSION = 1

_MAX_PEN_FRACTION = 0.05  # of a tile; above it the ink would be learned
_MAX_PADDING_FRACTION = 0.5
_MAX_ENLARGEMENT = 4  # times; more than that is a mistake in the scale
_PROBE_TILES = 64  # tiles that are read in full before a slide is believed to be readable
_BLOCK_TILES = 8  # tiles on a side that are read as one picture, to judge how sharp each is
_MIN_FILLED_FRACTION = 0.25  # of such a picture by tiles; below it they are read one by one
_MAX_THREADS = 4  # that read: more of them wait for Python's lock
_SUSPICIOUS_REMOVAL = 0.5  # of the tissue by one filter: worth a look whether the filter errs


@dataclass(frozen=True)
class TiledSlide:
    """A slide's grid with a status for each place."""

    positions: Positions
    statuses: NDArray[np.uint8]
    side_px0: int
    tissue: Mask
    thumbnail: Thumbnail
    tissue_mm2: float
    warnings: tuple[str, ...]

    @property
    def kept(self) -> Positions:
        """The tiles."""
        return self.positions[self.statuses == TileStatus.KEPT]

    @property
    def counts(self) -> dict[TileStatus, int]:
        """How many places got each status."""
        found = Counter(self.statuses.tolist())
        return {status: found[status] for status in TileStatus}


def tile_slide(
    slide: Slide, scale: Scale, spec: TileSpec, tissue_path: Path | None = None, threads: int = 1
) -> TiledSlide:
    """Decide a slide's tiles; `tissue_path` is a mask or GeoJSON that says where the tissue is."""
    metadata, mpp = slide.metadata, scale.mpp
    side_px0 = spec.side_px0(mpp)
    if side_px0 * _MAX_ENLARGEMENT < spec.tile_px:
        raise ScaleError(
            f"{metadata.path.name} has {mpp:g} um per pixel: a tile of {spec.tile_px} px at {spec.mpp:g} would be "
            f"{side_px0} of its pixels, enlarged.",
            hint="If that is not its scale, mend the column `mpp` (um per pixel, 0.25 at 40x); if it is, ask for a "
            f"coarser one: --mpp {mpp:g}",
        )
    # after an error OpenSlide answers nobody: a damaged tile would cost those of other threads
    threads = min(threads, _MAX_THREADS) if metadata.reader == "tiff" else 1
    longest_px = mask_side_px(max(metadata.bounds.width_px0, metadata.bounds.height_px0), mpp)
    thumbnail = make_thumbnail(slide, longest_px, threads)
    thumbnail_mpp = mpp * sum(thumbnail.downsample) / 2
    if tissue_path is None:
        # only OpenSlide's formats have gaps between what was scanned; elsewhere white is glass
        unscanned = metadata.background if metadata.reader == "openslide" else None
        tissue = tissue_mask(thumbnail.pixels, thumbnail_mpp, spec.tissue, unscanned)
    else:
        tissue = read_tissue_annotation(tissue_path, metadata, thumbnail)
    pen = pen_mask(thumbnail.pixels, thumbnail_mpp) if spec.drop_pen else np.zeros_like(tissue)

    positions = tile_grid(metadata.bounds, spec, mpp)

    def share(mask: Mask) -> NDArray[np.float64]:
        return mask_coverage(mask, thumbnail, positions, side_px0)

    enough = spec.min_tissue - 1e-9  # sums of many small shares round
    on_tissue = share(tissue) >= enough
    inked = on_tissue & ((share(pen) > _MAX_PEN_FRACTION) | (share(tissue & ~pen) < enough))
    statuses = np.full(len(positions), TileStatus.KEPT, np.uint8)
    statuses[~on_tissue] = TileStatus.BACKGROUND
    statuses[~on_tissue & (share(padding_mask(thumbnail.pixels)) > _MAX_PADDING_FRACTION)] = TileStatus.PADDING
    statuses[inked] = TileStatus.PEN
    warnings = list(scale.warnings)
    with strict_reader(slide) as reader, ThreadPoolExecutor(1) as beside:
        kept = np.flatnonzero(statuses == TileStatus.KEPT)
        probes = kept[:: max(1, len(kept) // _PROBE_TILES)]
        probing = beside.submit(_find_unreadable, reader, positions, probes, side_px0, spec.tile_px)
        if reader is slide:
            probing.result()  # one after the other, as after an error OpenSlide answers nobody
        if spec.drop_blur and mpp <= FOCUS_MPP:
            _mark_blurred_tiles(slide, positions, statuses, side_px0, mpp, threads)
        _mark_unreadable_tiles(reader, positions, statuses, side_px0, spec.tile_px, probes, probing.result())
    if side_px0 < spec.tile_px:
        warnings.append(f"{mpp:.4g} um per pixel is coarser than the {spec.mpp:g} asked for: tiles are enlarged")
    warnings += _removal_warnings(statuses)
    tissue_um2 = float((tissue & ~pen).sum()) * thumbnail_mpp**2
    return TiledSlide(positions, statuses, side_px0, tissue & ~pen, thumbnail, tissue_um2 / 1e6, tuple(warnings))


def _mark_blurred_tiles(
    slide: Slide, positions: Positions, statuses: NDArray[np.uint8], side_px0: int, mpp: float, threads: int = 1
) -> None:
    """Look at each tile that is still kept, small, and mark those that are blurred or cannot be read."""
    focus_px = max(8, round(side_px0 * mpp / FOCUS_MPP))
    kept = np.flatnonzero(statuses == TileStatus.KEPT)

    def judge(some: NDArray[np.intp]) -> None:
        tiles = _read_block(slide, positions[some], side_px0, focus_px)
        if tiles is None:
            one_by_one = [_read_or_none(slide, x, y, side_px0, focus_px) for x, y in positions[some].tolist()]
            lost = np.array([tile is None for tile in one_by_one])
            statuses[some[lost]] = TileStatus.UNREADABLE
            some, tiles = some[~lost], np.array([tile for tile in one_by_one if tile is not None])
        if len(some):
            statuses[some[detect_blur(tiles)]] = TileStatus.BLUR

    with ThreadPoolExecutor(threads) as pool:  # decoding and resizing do not hold Python's lock
        list(pool.map(judge, _group_into_blocks(slide.metadata, positions, kept, side_px0, focus_px)))
    _check_damage(slide, statuses[kept])


def _group_into_blocks(
    metadata: SlideMetadata, positions: Positions, chosen: NDArray[np.intp], side_px0: int, tile_px: int
) -> list[NDArray[np.intp]]:
    """Put tiles that lie together into blocks: what the file stores together is decoded and resized once."""
    level = metadata.levels[best_level(metadata.levels, side_px0 / tile_px)]
    across = min(_BLOCK_TILES, int(BLOCK_PX * level.downsample / side_px0))
    block_x, block_y = (positions[chosen] // (max(1, across) * side_px0)).T
    order = np.lexsort((block_x, block_y))
    ends = np.flatnonzero(np.diff(block_x[order]) | np.diff(block_y[order])) + 1
    return [block for block in np.split(chosen[order], ends) if len(block)]


def _read_block(slide: Slide, positions: Positions, side_px0: int, tile_px: int) -> Pixels | None:
    """Read tiles that lie together as one picture, and cut it; None where that does not pay, or not all is decoded.

    Tiles are cut to whole pixels of the picture: it is theirs exactly where they lie a multiple of those apart, as
    tiles side by side do, and less than one pixel beside it elsewhere.
    """
    corner, step = positions.min(axis=0), side_px0 / tile_px
    span = positions.max(axis=0) + side_px0 - corner
    if len(positions) * side_px0**2 < _MIN_FILLED_FRACTION * span.prod():
        return None
    size_px = (span / step + 1e-6).astype(int)
    try:
        picture = read_region(slide, *corner.tolist(), *np.minimum(size_px * step, span).tolist(), *size_px.tolist())
    except TileReadError:
        return None
    starts = np.minimum(np.rint((positions - corner) / step).astype(int), size_px - tile_px)
    return np.stack([picture[top : top + tile_px, left : left + tile_px] for left, top in starts.tolist()])


def _mark_unreadable_tiles(
    slide: Slide,
    positions: Positions,
    statuses: NDArray[np.uint8],
    side_px0: int,
    tile_px: int,
    probes: NDArray[np.intp],
    lost: NDArray[np.intp],
) -> None:
    """Mark those of some tiles that were read as training will and are lost; where one is, read all of them.

    Tissue and focus are judged on coarse levels, and damage may be in the fine one only. Reading every tile of every
    slide would take longer than all the rest.
    """
    kept = np.flatnonzero(statuses == TileStatus.KEPT)
    if len(lost):
        others = _find_unreadable(slide, positions, np.setdiff1d(kept, probes), side_px0, tile_px)
        statuses[np.intersect1d(kept, np.concatenate([lost, others]))] = TileStatus.UNREADABLE
    _check_damage(slide, statuses[kept])


def _find_unreadable(
    slide: Slide, positions: Positions, chosen: NDArray[np.intp], side_px0: int, tile_px: int
) -> NDArray[np.intp]:
    """Find those of the chosen tiles that cannot be decoded."""
    found = [_read_or_none(slide, x, y, side_px0, tile_px) is None for x, y in positions[chosen].tolist()]
    return chosen[np.array(found, bool)]


def _check_damage(slide: Slide, checked: NDArray[np.uint8]) -> None:
    """Give a slide up if too much of what was looked at cannot be decoded."""
    unreadable = int((checked == TileStatus.UNREADABLE).sum())
    if unreadable > MAX_UNREADABLE_FRACTION * len(checked):
        raise TileReadError(
            f"{slide.metadata.path.name}: {unreadable:,} of {len(checked):,} tiles cannot be decoded.",
            hint=DAMAGED_FILE_HINT,
        )


def _read_or_none(slide: Slide, x_px0: int, y_px0: int, side_px0: int, tile_px: int) -> Pixels | None:
    """Read a tile, once more after a failure (a network drive may hiccup); None where it cannot be decoded."""
    for _ in range(2):
        try:
            return slide.read(x_px0, y_px0, side_px0, tile_px)
        except TileReadError:
            continue
    return None


def _removal_warnings(statuses: NDArray[np.uint8]) -> list[str]:
    """Warn of a filter that took much of the tissue."""
    tissue = int((statuses != TileStatus.BACKGROUND).sum() - (statuses == TileStatus.PADDING).sum())
    return [
        f"{status.name.lower()} removed {removed:,} of {tissue:,} tissue tiles: look at the overlay"
        for status in (TileStatus.PEN, TileStatus.BLUR)
        if tissue and (removed := int((statuses == status).sum())) > _SUSPICIOUS_REMOVAL * tissue
    ]


def no_tiles_error(tiled: TiledSlide, slide_name: str, spec: TileSpec) -> NoTissueError:
    """Say why a slide has no tile."""
    if not len(tiled.positions):
        box = tiled.thumbnail.box
        return NoTissueError(
            f"{slide_name} has {box.width_px0:,} x {box.height_px0:,} pixels, less than one tile of "
            f"{tiled.side_px0} x {tiled.side_px0}.",
            hint="A smaller --size, or a finer --mpp, has room on it.",
        )
    taken = {
        v: n for v, n in tiled.counts.items() if v in (TileStatus.PEN, TileStatus.BLUR, TileStatus.UNREADABLE) and n
    }
    if taken:
        reasons = ", ".join(f"{count:,} by {status.name.lower()}" for status, count in taken.items())
        return NoTissueError(
            f"{slide_name} has tissue, but no tile is left of it: removed {reasons}.",
            hint="Look at its overlay; --keep-pen and --keep-blur switch the filters off.",
        )
    return NoTissueError(
        f"{slide_name} has no tissue: none of {len(tiled.positions):,} places is covered to {spec.min_tissue:.0%}.",
        hint="Look at its overlay; try --tissue texture, a lower --min-tissue, or draw it: --tissue-mask",
    )

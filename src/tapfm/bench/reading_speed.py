"""Measure how fast tiles are read, from the user's slides or from a synthetic slide."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tapfm.bench.bench_slides import SlideFile
from tapfm.slides.slide import Pixels
from tapfm.synthetic.cohort_plan import CohortSpec, plan_cohort
from tapfm.synthetic.slide_file import encode_svs
from tapfm.synthetic.slide_rendering import render_slide
from tapfm.tiles.reading import TileRequest
from tapfm.tiles.sampling import sample_tiles
from tapfm.tiles.store import TileSet
from tapfm.tiles.stream import TileStream

_TILES_PER_REQUEST = 64
_MIN_REQUESTS = 4  # that are timed
_PREFETCH_BYTES = 2**28
_SYNTHETIC_TILES = 20  # of the section
_REPEATS = 2  # copies of the synthetic section in each direction
_MIN_TISSUE_FRACTION = 0.25  # of a tile


@dataclass(frozen=True)
class ReadingSpeed:
    """Speed of reading tiles with a given number of worker processes."""

    workers: int
    slides: int
    synthetic: bool
    tiles: int
    seconds: float
    problem: str | None = None  # if no tile could be read
    reason: str | None = None  # of the problem; may contain the name of a slide

    @property
    def tiles_per_second(self) -> float | None:
        return self.tiles / self.seconds if self.tiles else None


def measure_reading(
    files: Sequence[SlideFile],
    tile_px: int,
    *,
    workers: int,
    budget_s: float,
    synthetic: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> ReadingSpeed:
    """Read tiles as in training, with `workers` processes, for about `budget_s` seconds.

    Timing starts after the workers have started up. It ends while they are still reading, so that the prefetch queue
    is equally full at the start and the end.
    """
    warmup = 2 * max(workers, 1)  # requests
    tiles, empty, reason = 0, 0, ""
    start = end = clock()
    with TileStream(_endless_requests(files, tile_px), workers=workers, prefetch_bytes=_PREFETCH_BYTES) as stream:
        for number, read in enumerate(stream):
            reason = read.reasons[0] if read.reasons else reason
            empty = 0 if len(read.rows) else empty + 1
            if empty > warmup + _MIN_REQUESTS:
                return ReadingSpeed(workers, len(files), synthetic, 0, 0.0, "no tile can be read", reason)
            if number < warmup:
                start = clock()
                continue
            tiles, end = tiles + len(read.rows), clock()
            if number >= warmup + _MIN_REQUESTS - 1 and end - start >= budget_s and tiles:
                break
    return ReadingSpeed(workers, len(files), synthetic, tiles, end - start)


def _endless_requests(files: Sequence[SlideFile], tile_px: int) -> Iterator[TileRequest]:
    """Yield requests for sampled tiles of the slides, epoch after epoch, as in training."""
    for epoch in itertools.count():
        for number, file in enumerate(files):
            rows = sample_tiles(len(file.tiles), _TILES_PER_REQUEST, 0, epoch, number)
            positions = file.tiles.positions[rows]
            yield TileRequest(file.tiles.slide_id, file.path, positions, file.tiles.side_px0, tile_px)


def write_synthetic_slide(folder: Path, tile_px: int) -> SlideFile:
    """Write a small synthetic 40x slide. Its decoded size is several times the cache of a slide reader."""
    cohort = plan_cohort(CohortSpec(slides=10, external=0, tiles=_SYNTHETIC_TILES))
    planned = next(slide for slide in cohort if slide.scanner.mpp < 0.3)
    rendered = render_slide(planned)
    path = folder / "synthetic.svs"
    path.write_bytes(encode_svs(_repeat_section(rendered.scan.pixels), planned.scanner, planned.slide_id))
    corners, side_px0 = rendered.truth.default_tile_grid()
    corners = corners[rendered.truth.coverage(rendered.truth.tissue, corners, side_px0) >= _MIN_TISSUE_FRACTION]
    height, width = rendered.scan.pixels.shape[:2]
    shifts = [(x * width, y * height) for y in range(_REPEATS) for x in range(_REPEATS)]
    positions = np.concatenate([corners + np.array(shift) for shift in shifts])
    return SlideFile(path, TileSet(planned.slide_id, positions, side_px0, tile_px))


def _repeat_section(pixels: Pixels) -> Pixels:
    """Repeat a section in both directions."""
    return np.tile(pixels, (_REPEATS, _REPEATS, 1))

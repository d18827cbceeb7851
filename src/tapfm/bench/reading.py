"""How fast tiles are read: from the user's slides, or from one that is painted for it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tapfm.bench.slides import SlideFile
from tapfm.slides.slide import Pixels
from tapfm.synthetic.cohort import CohortSpec, plan_cohort
from tapfm.synthetic.slide_file import encode_svs
from tapfm.synthetic.slides import render_slide
from tapfm.tiles.reading import TileRequest
from tapfm.tiles.sampling import sample_tiles
from tapfm.tiles.store import TileSet
from tapfm.tiles.stream import TileStream

_REQUEST = 64  # tiles
_LEAST = 4  # requests that are timed
_PREFETCH_BYTES = 2**28
_PAINTED_TILES, _REPEATED = 20, 2  # a painted section, laid so many times across and down
_TISSUE = 0.25  # of a tile


@dataclass(frozen=True)
class ReadingSpeed:
    """Tiles read by some processes; `problem` where none could be."""

    workers: int
    slides: int
    painted: bool
    tiles: int
    seconds: float
    problem: str | None = None
    reason: str | None = None  # of the problem; it may name a slide

    @property
    def tiles_per_second(self) -> float | None:
        """Give the speed."""
        return self.tiles / self.seconds if self.tiles else None


def reading_speed(
    files: Sequence[SlideFile],
    tile_px: int,
    *,
    workers: int,
    budget_s: float,
    painted: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> ReadingSpeed:
    """Read as training does, in `workers` processes, for about `budget_s`.

    Timing begins when every process has had work: until then they start. It ends while they are still reading, so that
    as many tiles are on their way at the end as at the beginning.
    """
    started = 2 * max(workers, 1)
    tiles, empty, reason = 0, 0, ""
    begin = end = clock()
    with TileStream(_endless_requests(files, tile_px), workers=workers, prefetch_bytes=_PREFETCH_BYTES) as stream:
        for number, read in enumerate(stream):
            reason = read.reasons[0] if read.reasons else reason
            empty = 0 if len(read.rows) else empty + 1
            if empty > started + _LEAST:
                return ReadingSpeed(workers, len(files), painted, 0, 0.0, "no tile can be read", reason)
            if number < started:
                begin = clock()
                continue
            tiles, end = tiles + len(read.rows), clock()
            if number >= started + _LEAST - 1 and end - begin >= budget_s and tiles:
                break
    return ReadingSpeed(workers, len(files), painted, tiles, end - begin)


def _endless_requests(files: Sequence[SlideFile], tile_px: int) -> Iterator[TileRequest]:
    """Ask for some tiles of one slide after the other, drawn as for an epoch of training."""
    for epoch in itertools.count():
        for number, file in enumerate(files):
            rows = sample_tiles(len(file.tiles), _REQUEST, 0, epoch, number)
            positions = file.tiles.positions[rows]
            yield TileRequest(file.tiles.slide_id, file.path, positions, file.tiles.side_px0, tile_px)


def painted_file(folder: Path, tile_px: int) -> SlideFile:
    """Paint a small 40x slide, several times larger decoded than what readers keep."""
    planned = next(
        each for each in plan_cohort(CohortSpec(slides=10, external=0, tiles=_PAINTED_TILES)) if each.scanner.mpp < 0.3
    )
    painted = render_slide(planned)
    path = folder / "painted.svs"
    path.write_bytes(encode_svs(_repeated(painted.scan.pixels), planned.scanner, planned.slide_id))
    corners, side_px0 = painted.truth.default_grid()
    corners = corners[painted.truth.coverage(painted.truth.tissue, corners, side_px0) >= _TISSUE]
    height, width = painted.scan.pixels.shape[:2]
    shifts = [(x * width, y * height) for y in range(_REPEATED) for x in range(_REPEATED)]
    positions = np.concatenate([corners + np.array(shift) for shift in shifts])
    return SlideFile(path, TileSet(planned.slide_id, positions, side_px0, tile_px))


def _repeated(pixels: Pixels) -> Pixels:
    """Lay a section side by side with itself."""
    return np.tile(pixels, (_REPEATED, _REPEATED, 1))

"""Compare the speed of reading tiles with OpenSlide, tiffslide and tapfm, on one core, with the same resizing.

    python benchmarks/reading.py                        # synthetic and real slides, in grid and random order
    python benchmarks/reading.py --slides folder        # real slides in another folder
    python benchmarks/reading.py --json out/reading.json

Writes a synthetic slide with the colours and the entropy of a stained section, many times larger than the caches, as
tiled JPEG with Aperio's header. Reads tiles of 224 px at 0.5 microns per pixel from it, as a 20x slide (224 px at level
0) and as a 40x slide (448 px at level 0, resized), in grid order and in random order. Then reads tiles of 224 px, and
of 448 px resized to 224, from every .svs, .tif and .tiff file in `--slides` that all readers can open (default:
../shared/data/slides, next to the checkout). Reads at most 2,000 tiles for each row. If a real slide fits into the
caches, use a smaller `--cache-mib`.

tiffslide is optional and skipped if it is missing: pip install 'tapfm[bench]'. It has no cache of decoded tiles: the
32 MiB are for OpenSlide and tapfm. It returns arrays and decodes on the same core.

Prints Markdown. Each value is the median of several rounds in which the readers take turns, each with a newly opened
slide; opening is not timed. Times are CPU times of this process, which other processes hardly influence; files are in
the page cache. Ratios are medians of the ratios of tapfm to the other reader in each round. A difference is the largest
difference of a pixel value to OpenSlide, over all tiles of the row (at most 300).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np
import openslide
import tifffile
from numpy.typing import NDArray

import tapfm
from tapfm.slides.readers.openslide import OpenSlideSlide
from tapfm.slides.readers.tiff import open_tiff
from tapfm.slides.region_reading import read_tile
from tapfm.slides.slide import CACHE_BYTES, Box, Level, Pixels, SlideMetadata

tiffslide: Any = None
if importlib.util.find_spec("tiffslide"):
    tiffslide = importlib.import_module("tiffslide")

SLIDES = Path(__file__).parents[2] / "shared" / "data" / "slides"
TILE_PX = 224
WIDTH_PX, HEIGHT_PX = 12_288, 10_240


class PlainOpenSlide(OpenSlideSlide):
    """OpenSlide without the transparency check of tapfm's reader, which these slides do not need."""

    def read_level(self, level: int, x_px: int, y_px: int, width_px: int, height_px: int) -> Pixels:
        return np.asarray(self._handle.read_region((x_px, y_px), level, (width_px, height_px)).convert("RGB"))


class Tiffslide:
    """A slide opened with the library tiffslide."""

    def __init__(self, path: Path, cache_bytes: int = 0) -> None:  # noqa: ARG002  # it has no cache
        self._handle = tiffslide.TiffSlide(path)
        levels = tuple(Level.from_sizes(*size, *self._handle.dimensions) for size in self._handle.level_dimensions)
        bounds = Box(0, 0, levels[0].width_px, levels[0].height_px)
        self.metadata = SlideMetadata(path, "TIFF", "", "tiffslide", levels, None, None, bounds)

    def read_level(self, level: int, x_px: int, y_px: int, width_px: int, height_px: int) -> Pixels:
        downsample = self._handle.level_downsamples[level]
        corner = (round(x_px * downsample), round(y_px * downsample))
        return np.asarray(self._handle.read_region(corner, level, (width_px, height_px), as_array=True), np.uint8)

    def read(self, x_px0: int, y_px0: int, side_px0: int, tile_px: int) -> Pixels:
        return read_tile(self, x_px0, y_px0, side_px0, tile_px)

    def close(self) -> None:
        self._handle.close()


class Reader(Protocol):
    """Interface of the measured readers."""

    def read(self, x_px0: int, y_px0: int, side_px0: int, tile_px: int) -> Pixels: ...

    def close(self) -> None: ...


def list_readers() -> dict[str, Callable[[Path, int], Reader]]:
    readers: dict[str, Callable[[Path, int], Reader]] = {"OpenSlide": PlainOpenSlide}
    if tiffslide is not None:
        readers["tiffslide"] = Tiffslide
    return readers | {"tapfm": open_tiff}


@dataclass
class Row:
    """Speeds of all readers. `differences` are relative to OpenSlide's pixels."""

    slide: str
    tiles: str
    order: str
    count: int
    tiles_per_second: dict[str, float]
    ratios: dict[str, float]
    differences: dict[str, int]


def render_section(rng: np.random.Generator) -> NDArray[np.uint8]:
    """Render a section: pink background, purple nuclei, texture at several scales, camera noise."""
    size = 2048
    background = np.zeros((size, size), np.float32)
    for scale_px in (4, 16, 64):
        noise = rng.standard_normal((size // scale_px, size // scale_px)).astype(np.float32)
        background += cv2.resize(noise, (size, size), interpolation=cv2.INTER_CUBIC) / 3
    image = np.array([228, 176, 205], np.float32) + background[..., None] * np.array([14, 22, 14], np.float32)
    for x, y, radius in zip(*rng.integers(0, size, (2, 5000)), rng.integers(5, 11, 5000), strict=True):
        colour = [float(c) for c in np.array([112, 74, 150]) + rng.normal(0, 12, 3)]
        cv2.circle(image, (int(x), int(y)), int(radius), colour, -1, cv2.LINE_AA)
    image = cv2.GaussianBlur(image, (0, 0), 0.8) + rng.normal(0, 3, image.shape)
    return np.clip(image, 0, 255).astype(np.uint8)


def write_slide(path: Path, objective: int) -> None:
    """Write a synthetic section, repeated with rotations, as an SVS file with one level."""
    section = render_section(np.random.default_rng(0))
    slide = np.empty((HEIGHT_PX, WIDTH_PX, 3), np.uint8)
    for i, top in enumerate(range(0, HEIGHT_PX, 2048)):
        for j, left in enumerate(range(0, WIDTH_PX, 2048)):
            slide[top : top + 2048, left : left + 2048] = np.rot90(section, i + j)
    header = f"Aperio Image Library v12.0\r\n{WIDTH_PX}x{HEIGHT_PX} (256x256) JPEG/RGB Q=75"
    description = f"{header}|AppMag = {objective}|MPP = {10 / objective}"
    with tifffile.TiffWriter(path) as file:
        file.write(
            slide,
            tile=(256, 256),
            photometric="rgb",  # stored as YCbCr
            subsampling=(2, 2),
            compression="jpeg",
            compressionargs={"level": 75},
            description=description,
            metadata=None,
        )


def list_positions(
    side_px0: int, order: str, count: int, size_px0: tuple[int, int] = (WIDTH_PX, HEIGHT_PX)
) -> list[tuple[int, int]]:
    """Return at most `count` positions of the tile grid, row by row or in random order."""
    grid = [
        (x, y)
        for y in range(0, size_px0[1] - side_px0 + 1, side_px0)
        for x in range(0, size_px0[0] - side_px0 + 1, side_px0)
    ]
    if order == "random":
        grid = [grid[i] for i in np.random.default_rng(1).permutation(len(grid))]
    return grid[:count]


def tiles_per_second(slide: Reader, positions: list[tuple[int, int]], side_px0: int) -> float:
    start = time.process_time()
    for x_px0, y_px0 in positions:
        slide.read(x_px0, y_px0, side_px0, TILE_PX)
    return len(positions) / (time.process_time() - start)


def measure(path: Path, side_px0: int, order: str, rounds: int, name: str = "", cache_bytes: int = CACHE_BYTES) -> Row:
    """Measure all readers in turns, each with a newly opened slide."""
    with closing(open_tiff(path)) as opened:
        size_px0 = (opened.metadata.width_px0, opened.metadata.height_px0)
    positions = list_positions(side_px0, order, 2000, size_px0)
    speeds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for reader, open_slide in list_readers().items():
            slide = open_slide(path, cache_bytes)
            speeds.setdefault(reader, []).append(tiles_per_second(slide, positions, side_px0))
            slide.close()
    tiles = f"{side_px0} px" if side_px0 == TILE_PX else f"{side_px0} -> {TILE_PX} px"
    return Row(
        name or path.name,
        tiles,
        order,
        len(positions),
        {reader: statistics.median(values) for reader, values in speeds.items()},
        {
            reader: statistics.median(ours / theirs for ours, theirs in zip(speeds["tapfm"], values, strict=True))
            for reader, values in speeds.items()
            if reader != "tapfm"
        },
        largest_differences(path, positions[:300], side_px0),
    )


def largest_differences(path: Path, positions: list[tuple[int, int]], side_px0: int) -> dict[str, int]:
    """Return the largest difference of a pixel value between each reader and OpenSlide."""
    expected = OpenSlideSlide(path)
    differences = {}
    for reader, open_slide in list_readers().items():
        slide = open_slide(path, CACHE_BYTES)
        differences[reader] = max(
            int(np.abs(expected.read(x, y, side_px0, TILE_PX).astype(int) - slide.read(x, y, side_px0, TILE_PX)).max())
            for x, y in positions
        )
        slide.close()
    expected.close()
    return {reader: difference for reader, difference in differences.items() if reader != "OpenSlide"}


def measure_synthetic(rounds: int) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for objective, side_px0 in ((20, TILE_PX), (40, 2 * TILE_PX)):
            path = Path(folder) / f"{objective}x.svs"
            write_slide(path, objective)
            bits = 8 * path.stat().st_size / (WIDTH_PX * HEIGHT_PX)
            name = f"synthetic, {objective}x, {bits:.1f} bits per pixel"
            rows += [measure(path, side_px0, order, rounds, name) for order in ("grid", "random")]
    return rows


def measure_real(folder: Path, rounds: int, cache_bytes: int = CACHE_BYTES) -> list[Row]:
    """Measure the slides of a folder that all readers can open."""
    rows = []
    for path in sorted([*folder.glob("*.svs"), *folder.glob("*.tif*")]):
        try:
            for open_slide in list_readers().values():
                open_slide(path, CACHE_BYTES).close()
        except Exception as error:  # each library has its own errors
            print(f"Skipped {path.name}: {str(error).splitlines()[0]}\n")
            continue
        rows += [
            measure(path, side_px0, order, rounds, cache_bytes=cache_bytes)
            for side_px0 in (TILE_PX, 2 * TILE_PX)
            for order in ("grid", "random")
        ]
    return rows


def format_table(rows: list[Row]) -> str:
    names = list(list_readers())
    others = [name for name in names if name != "tapfm"]
    compared = [name for name in names if name != "OpenSlide"]
    header = [
        *("slide", "tiles", "order", "count"),
        *(f"{name} tiles/s" for name in names),
        *(f"tapfm / {name}" for name in others),
        *(f"{name}: difference" for name in compared),
    ]
    lines = ["| " + " | ".join(header) + " |", "|---" * 3 + "|--:" * (len(header) - 3) + "|"]
    for row in rows:
        cells = [
            *(row.slide, row.tiles, row.order, f"{row.count:,}"),
            *(f"{row.tiles_per_second[name]:,.0f}" for name in names),
            *(f"{row.ratios[name]:.1f}" for name in others),
            *(str(row.differences[name]) for name in compared),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slides", type=Path, default=SLIDES, help="folder with real slides")
    parser.add_argument(
        "--cache-mib", type=float, default=CACHE_BYTES / 2**20, help="cache of a reader for real slides, in MiB"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    cv2.setNumThreads(1)
    versions = f"tapfm {tapfm.__version__}, OpenSlide {openslide.__library_version__}, tifffile {tifffile.__version__}"
    if tiffslide is None:
        print("tiffslide is not installed and is skipped. To compare it: pip install 'tapfm[bench]'\n")
    else:
        versions += f", tiffslide {tiffslide.__version__}, zarr {importlib.import_module('zarr').__version__}"
    print(
        f"{versions}, {platform.machine()}, one core; synthetic slides of {WIDTH_PX:,} x {HEIGHT_PX:,} px, decoded "
        f"{3 * WIDTH_PX * HEIGHT_PX / CACHE_BYTES:.1f} times the cache of {CACHE_BYTES / 2**20:.0f} MiB\n"
    )
    rows = measure_synthetic(arguments.rounds)
    if arguments.slides.is_dir():
        rows += measure_real(arguments.slides, arguments.rounds, round(arguments.cache_mib * 2**20))
    else:
        print(f"{arguments.slides} does not exist; real slides are skipped. Pass their folder with --slides.\n")
    print(format_table(rows))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()

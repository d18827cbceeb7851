"""Reading tiles, side by side: OpenSlide and ours, on one core, with equal caches and the same resize.

    python benchmarks/reading.py                        # both scans, both orders
    python benchmarks/reading.py --json out/reading.json

Writes a slide of painted noise with the colours and the entropy of a stained section, many times larger than the
caches, as tiled JPEG with Aperio's header; reads tiles of 224 px at 0.5 um per pixel from it as a 20x slide (224 px of
level 0) and as a 40x slide (448 px of level 0, resized); in grid order and in random order. Prints Markdown. Each
figure is the median of several rounds in which the two take turns; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np
import openslide
import tifffile
from numpy.typing import NDArray

import tapfm
from tapfm.slides.readers.openslide import OpenSlideSlide
from tapfm.slides.readers.tiff import TiffSlide
from tapfm.slides.slide import CACHE_BYTES, Pixels, Slide

WIDTH_PX, HEIGHT_PX = 12_288, 10_240


class PlainOpenSlide(OpenSlideSlide):
    """OpenSlide as cheap as it can be used: our reader's look at transparency, which this slide has not, left out."""

    def read_level(self, level: int, x_px: int, y_px: int, width_px: int, height_px: int) -> Pixels:
        return np.asarray(self._handle.read_region((x_px, y_px), level, (width_px, height_px)).convert("RGB"))


READERS: dict[str, Callable[[Path, int], Slide]] = {"OpenSlide": PlainOpenSlide, "tapfm": TiffSlide}


@dataclass
class Row:
    """One measurement."""

    scan: str
    order: str
    openslide_tiles_per_second: float
    tapfm_tiles_per_second: float
    ratio: float


def paint(rng: np.random.Generator) -> NDArray[np.uint8]:
    """Paint a section: pink ground, purple nuclei, texture at several scales, camera noise."""
    size = 2048
    ground = np.zeros((size, size), np.float32)
    for scale_px in (4, 16, 64):
        noise = rng.standard_normal((size // scale_px, size // scale_px)).astype(np.float32)
        ground += cv2.resize(noise, (size, size), interpolation=cv2.INTER_CUBIC) / 3
    picture = np.array([228, 176, 205], np.float32) + ground[..., None] * np.array([14, 22, 14], np.float32)
    for x, y, radius in zip(*rng.integers(0, size, (2, 5000)), rng.integers(5, 11, 5000), strict=True):
        colour = [float(c) for c in np.array([112, 74, 150]) + rng.normal(0, 12, 3)]
        cv2.circle(picture, (int(x), int(y)), int(radius), colour, -1, cv2.LINE_AA)
    picture = cv2.GaussianBlur(picture, (0, 0), 0.8) + rng.normal(0, 3, picture.shape)
    return np.clip(picture, 0, 255).astype(np.uint8)


def write_slide(path: Path, objective: int) -> None:
    """Write the painting, repeated with turns, as a one-level SVS."""
    painting = paint(np.random.default_rng(0))
    slide = np.empty((HEIGHT_PX, WIDTH_PX, 3), np.uint8)
    for i, top in enumerate(range(0, HEIGHT_PX, 2048)):
        for j, left in enumerate(range(0, WIDTH_PX, 2048)):
            slide[top : top + 2048, left : left + 2048] = np.rot90(painting, i + j)
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


def positions(side_px0: int, order: str, count: int) -> list[tuple[int, int]]:
    """Lay the grid; the first tiles of it, or random ones."""
    grid = [
        (x, y)
        for y in range(0, HEIGHT_PX - side_px0 + 1, side_px0)
        for x in range(0, WIDTH_PX - side_px0 + 1, side_px0)
    ]
    if order == "random":
        grid = [grid[i] for i in np.random.default_rng(1).permutation(len(grid))]
    return grid[:count]


def tiles_per_second(slide: Slide, where: list[tuple[int, int]], side_px0: int) -> float:
    start = time.perf_counter()
    for x_px0, y_px0 in where:
        slide.read(x_px0, y_px0, side_px0, 224)
    return len(where) / (time.perf_counter() - start)


def measure(path: Path, scan: str, side_px0: int, order: str, rounds: int) -> Row:
    """Let the two take turns, each with a fresh slide."""
    where = positions(side_px0, order, count=2000)
    speeds: dict[str, list[float]] = {name: [] for name in READERS}
    for _ in range(rounds):
        for name, reader in READERS.items():
            slide = reader(path, CACHE_BYTES)
            speeds[name].append(tiles_per_second(slide, where, side_px0))
            slide.close()
    ratios = [ours / theirs for ours, theirs in zip(speeds["tapfm"], speeds["OpenSlide"], strict=True)]
    return Row(
        scan,
        order,
        statistics.median(speeds["OpenSlide"]),
        statistics.median(speeds["tapfm"]),
        statistics.median(ratios),
    )


def same_pixels(path: Path, side_px0: int) -> bool:
    """Check what makes the comparison fair: both give the same tiles."""
    theirs, ours = OpenSlideSlide(path), TiffSlide(path)
    return all(
        np.array_equal(theirs.read(x, y, side_px0, 224), ours.read(x, y, side_px0, 224))
        for x, y in positions(side_px0, "random", count=100)
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    cv2.setNumThreads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for scan, objective, side_px0 in (("20x: 224 px", 20, 224), ("40x: 448 -> 224 px", 40, 448)):
            path = Path(folder) / f"{objective}x.svs"
            write_slide(path, objective)
            assert same_pixels(path, side_px0)
            bits = 8 * path.stat().st_size / (WIDTH_PX * HEIGHT_PX)
            rows += [measure(path, scan, side_px0, order, arguments.rounds) for order in ("grid", "random")]
    decoded_bytes = 3 * WIDTH_PX * HEIGHT_PX
    print(
        f"tapfm {tapfm.__version__}, OpenSlide {openslide.__library_version__}, {platform.machine()}, one core; "
        f"{WIDTH_PX:,} x {HEIGHT_PX:,} px, {bits:.1f} bits per pixel, "
        f"decoded {decoded_bytes / CACHE_BYTES:.1f} times the cache of {CACHE_BYTES / 2**20:.0f} MiB\n"
    )
    print("| scan | order | OpenSlide tiles/s | tapfm tiles/s | ratio |\n|---|---|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row.scan} | {row.order} | {row.openslide_tiles_per_second:,.0f} | {row.tapfm_tiles_per_second:,.0f} "
            f"| {row.ratio:.1f} |"
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()

"""Load test of the viewer: a server process, and eight clients that pan and zoom over a local connection.

    python benchmarks/viewer.py
    python benchmarks/viewer.py --clients 8 --steps 100 --json out/viewer.json

Writes a synthetic slide that is much larger than the caches of decoded pixels, and starts `tapfm view` on it. Each
client follows its own random path: at each step it zooms in, zooms out or moves by half a window. It then requests the
images in its window of 1280 x 900 pixels that it does not have yet, over six connections like a browser. In the cold
run the server's cache is empty. In the cached run new clients follow the same paths, like colleagues who view the same
slide. A step is finished when all its images have arrived. The clients measure the time of requests and steps.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import cv2
import numpy as np
import tifffile
from reading import render_section

import tapfm

WINDOW_PX = (1280, 900)
BROWSER_CONNECTIONS = 6


@dataclass(frozen=True)
class Measurement:
    """One row of the printed table."""

    name: str
    clients: int
    requests: int
    requests_per_second: float
    megabytes_per_second: float
    p50_ms: float
    p95_ms: float
    step_p50_ms: float
    step_p95_ms: float


@dataclass(frozen=True)
class Pyramid:
    """Key of a slide, and the size of its image pyramid."""

    key: str
    width_px0: int
    height_px0: int
    last_level: int
    image_px: int


ImageIndex = tuple[int, int, int]  # level, column, row


def write_slide(path: Path, width_px: int, height_px: int) -> None:
    """Write a slide with Aperio's header: levels with downsamples 1, 4 and 16, JPEG tiles of 256 px."""
    pattern = render_section(np.random.default_rng(0))
    pattern_px = len(pattern)
    header = f"Aperio Image Library v12.0\r\n{width_px}x{height_px} (256x256) JPEG/RGB Q=80|AppMag = 40|MPP = 0.25"
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for downsample in (1, 4, 16):
            side = pattern_px // downsample
            downsampled = cv2.resize(pattern, (side, side), interpolation=cv2.INTER_AREA)
            vertical, horizontal = math.ceil(height_px / pattern_px), math.ceil(width_px / pattern_px)
            level = np.tile(downsampled, (vertical, horizontal, 1))[: height_px // downsample, : width_px // downsample]
            file.write(
                level,
                tile=(256, 256),
                photometric="rgb",
                subsampling=(2, 2),
                compression="jpeg",
                compressionargs={"level": 80},
                description=header,
                metadata=None,
            )


def visible_images(pyramid: Pyramid, level: int, x: float, y: float) -> list[ImageIndex]:
    """Return the images in a window centred at (x, y), in pixels of the level."""
    downsample = 2 ** (pyramid.last_level - level)
    spans = []
    for centre, window_px, length_px0 in zip((x, y), WINDOW_PX, (pyramid.width_px0, pyramid.height_px0), strict=True):
        count = math.ceil(length_px0 / downsample / pyramid.image_px)
        first, last = (math.floor((centre + side * window_px / 2) / pyramid.image_px) for side in (-1, 1))
        spans.append(range(max(0, first), min(count - 1, last) + 1))
    return [(level, column, row) for row in spans[1] for column in spans[0]]


def random_path(pyramid: Pyramid, seed: int, steps: int) -> list[list[ImageIndex]]:
    """Return the new images that each step of a random path needs."""
    rng = np.random.default_rng(seed)
    level, x, y = 0, pyramid.width_px0 / 2, pyramid.height_px0 / 2
    loaded: set[ImageIndex] = set()
    path = []
    for _ in range(steps):
        move = rng.choice(["in", "out", "pan"], p=[0.3, 0.15, 0.55])
        if move == "in" and level < pyramid.last_level:
            level += 1
            x, y = (centre + 300 * rng.normal() * 2 ** (pyramid.last_level - level) for centre in (x, y))
        elif move == "out" and level > 0:
            level -= 1
        downsample = 2 ** (pyramid.last_level - level)
        if move == "pan":
            x, y = (
                centre + rng.choice([-0.5, 0, 0.5]) * window_px * downsample
                for centre, window_px in zip((x, y), WINDOW_PX, strict=True)
            )
        x, y = min(max(x, 0), pyramid.width_px0), min(max(y, 0), pyramid.height_px0)
        visible = visible_images(pyramid, level, x / downsample, y / downsample)
        new = [index for index in visible if index not in loaded]
        loaded.update(new)
        path.append(new)
    return path


class Client:
    """A client with persistent connections that records the duration of requests and steps."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self.host_and_port = (parts.hostname or "", parts.port or 80)
        self.local = threading.local()
        self.pool = ThreadPoolExecutor(BROWSER_CONNECTIONS)
        self.requests_s: list[float] = []
        self.steps_s: list[float] = []
        self.bytes = 0

    def get(self, path: str) -> bytes:
        connection: http.client.HTTPConnection | None = getattr(self.local, "connection", None)
        if connection is None:
            connection = self.local.connection = http.client.HTTPConnection(*self.host_and_port, timeout=60)
        connection.request("GET", path)
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise RuntimeError(f"GET {path} failed with HTTP status {response.status}: {data[:200]!r}")
        return data

    def load_image(self, key: str, index: ImageIndex) -> int:
        level, column, row = index
        start = time.perf_counter()
        data = self.get(f"/api/slides/{key}/images/{level}/{column}_{row}.jpeg")
        self.requests_s.append(time.perf_counter() - start)
        return len(data)

    def follow_path(self, key: str, path: Sequence[Sequence[ImageIndex]]) -> None:
        for images in path:
            start = time.perf_counter()
            self.bytes += sum(self.pool.map(lambda index: self.load_image(key, index), images))
            if images:
                self.steps_s.append(time.perf_counter() - start)
        self.pool.shutdown()


def measure(address: str, pyramid: Pyramid, name: str, clients: int, steps: int) -> Measurement:
    """Run all clients at the same time."""
    all_clients = [Client(address) for _ in range(clients)]
    paths = [random_path(pyramid, seed, steps) for seed in range(clients)]
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda client, path: client.follow_path(pyramid.key, path), all_clients, paths))
    seconds = time.perf_counter() - start
    requests_ms = 1000 * np.array([duration for client in all_clients for duration in client.requests_s])
    steps_ms = 1000 * np.array([duration for client in all_clients for duration in client.steps_s])
    return Measurement(
        name,
        clients,
        len(requests_ms),
        len(requests_ms) / seconds,
        sum(client.bytes for client in all_clients) / seconds / 1e6,
        *(float(np.percentile(requests_ms, q)) for q in (50, 95)),
        *(float(np.percentile(steps_ms, q)) for q in (50, 95)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8, help="number of clients")
    parser.add_argument("--steps", type=int, default=100, help="number of steps of each client")
    parser.add_argument("--width", type=int, default=24_576, help="width of the slide in pixels")
    parser.add_argument("--height", type=int, default=18_432, help="height of the slide in pixels")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slide.svs"
        write_slide(path, arguments.width, arguments.height)
        program = [sys.executable, "-c", "from tapfm.cli.main import main; main()"]
        command = [*program, "view", str(path), "--port", "0", "--no-browser"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            if not address:
                raise SystemExit("tapfm view did not start. Build its web pages first: make setup")
            client = Client(address)
            (summary,) = json.loads(client.get("/api/collection"))["slides"]
            slide = json.loads(client.get(f"/api/slides/{summary['key']}"))
            size = (slide["width_px0"], slide["height_px0"], slide["last_level"], slide["image_px"])
            pyramid = Pyramid(summary["key"], *size)
            rows = [measure(address, pyramid, name, arguments.clients, arguments.steps) for name in ("cold", "cached")]
        finally:
            server.terminate()
            server.wait(30)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(
        f"tapfm {tapfm.__version__}, {platform.machine()}, {cores} cores shared by server and clients; "
        f"{arguments.width:,} x {arguments.height:,} px, images of {pyramid.image_px} px, "
        f"{arguments.clients} clients, {arguments.steps} steps each\n"
    )
    print("| | requests | requests/s | MB/s | p50, ms | p95, ms | step p50, ms | step p95, ms |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row.name} | {row.requests:,} | {row.requests_per_second:,.0f} | {row.megabytes_per_second:,.0f} "
            f"| {row.p50_ms:.1f} | {row.p95_ms:.1f} | {row.step_p50_ms:.0f} | {row.step_p95_ms:.0f} |"
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()

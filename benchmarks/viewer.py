"""The viewer's server under eight people who pan and zoom: a real server process, asked over loopback.

    python benchmarks/viewer.py
    python benchmarks/viewer.py --clients 8 --steps 100 --json out/viewer.json

Writes a pyramid of painted tissue, many times larger than the caches of decoded pixels, starts `tapfm view` on it and
lets each client walk its own way: at each step it zooms in or out or moves by half a window, and asks for the pictures
that a window of 1280 x 900 pixels then shows and that it has not got yet, six at a time as browsers do. Cold, the
server has kept nothing; cached, it is walked the same way again by clients who have nothing, as when colleagues look
at the same slide. A step is fluid when all its pictures are there; requests and steps are timed by the client.
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
from reading import paint

import tapfm

WINDOW_PX = (1280, 900)
AT_ONCE = 6  # connections of a browser to a server


@dataclass(frozen=True)
class Row:
    """One measurement."""

    what: str
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
    """What the server says of the slide."""

    key: str
    width_px0: int
    height_px0: int
    last_level: int
    picture_px: int


Place = tuple[int, int, int]  # level, column, row


def write_slide(path: Path, width_px: int, height_px: int) -> None:
    """Write a pyramid with Aperio's header: downsamples 1, 4, 16, tiles of 256 px, JPEG."""
    painting = paint(np.random.default_rng(0))
    painting_px = len(painting)
    header = f"Aperio Image Library v12.0\r\n{width_px}x{height_px} (256x256) JPEG/RGB Q=80|AppMag = 40|MPP = 0.25"
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for downsample in (1, 4, 16):
            side = painting_px // downsample
            small = cv2.resize(painting, (side, side), interpolation=cv2.INTER_AREA)
            down, across = math.ceil(height_px / painting_px), math.ceil(width_px / painting_px)
            level = np.tile(small, (down, across, 1))[: height_px // downsample, : width_px // downsample]
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


def in_window(pyramid: Pyramid, level: int, x: float, y: float) -> list[Place]:
    """List the pictures that a window shows whose centre is at (x, y), in pixels of the level."""
    downsample = 2 ** (pyramid.last_level - level)
    spans = []
    for centre, window, length_px0 in zip((x, y), WINDOW_PX, (pyramid.width_px0, pyramid.height_px0), strict=True):
        count = math.ceil(length_px0 / downsample / pyramid.picture_px)
        first, last = (math.floor((centre + side * window / 2) / pyramid.picture_px) for side in (-1, 1))
        spans.append(range(max(0, first), min(count - 1, last) + 1))
    return [(level, column, row) for row in spans[1] for column in spans[0]]


def walk(pyramid: Pyramid, seed: int, steps: int) -> list[list[Place]]:
    """Zoom in somewhere, look around, zoom out again: the pictures that each step needs and that are new."""
    rng = np.random.default_rng(seed)
    level, x, y = 0, pyramid.width_px0 / 2, pyramid.height_px0 / 2
    seen: set[Place] = set()
    needed = []
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
                centre + rng.choice([-0.5, 0, 0.5]) * side * downsample
                for centre, side in zip((x, y), WINDOW_PX, strict=True)
            )
        x, y = min(max(x, 0), pyramid.width_px0), min(max(y, 0), pyramid.height_px0)
        new = [place for place in in_window(pyramid, level, x / downsample, y / downsample) if place not in seen]
        seen.update(new)
        needed.append(new)
    return needed


class Client:
    """A browser: six connections that stay open, and a clock."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self.where = (parts.hostname or "", parts.port or 80)
        self.open = threading.local()
        self.pool = ThreadPoolExecutor(AT_ONCE)
        self.requests_s: list[float] = []
        self.steps_s: list[float] = []
        self.bytes = 0

    def ask(self, path: str) -> bytes:
        connection: http.client.HTTPConnection | None = getattr(self.open, "connection", None)
        if connection is None:
            connection = self.open.connection = http.client.HTTPConnection(*self.where, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} for {path}: {data[:200]!r}")
        return data

    def picture(self, key: str, place: Place) -> int:
        level, column, row = place
        start = time.perf_counter()
        data = self.ask(f"/api/slides/{key}/pictures/{level}/{column}_{row}.jpeg")
        self.requests_s.append(time.perf_counter() - start)
        return len(data)

    def go(self, key: str, steps: Sequence[Sequence[Place]]) -> None:
        for places in steps:
            start = time.perf_counter()
            self.bytes += sum(self.pool.map(lambda place: self.picture(key, place), places))
            if places:
                self.steps_s.append(time.perf_counter() - start)
        self.pool.shutdown()


def measure(address: str, pyramid: Pyramid, what: str, clients: int, steps: int) -> Row:
    """Let all clients walk at once."""
    people = [Client(address) for _ in range(clients)]
    ways = [walk(pyramid, seed, steps) for seed in range(clients)]
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as together:
        list(together.map(lambda pair: pair[0].go(pyramid.key, pair[1]), zip(people, ways, strict=True)))
    seconds = time.perf_counter() - start
    requests_ms = 1000 * np.array([each for person in people for each in person.requests_s])
    steps_ms = 1000 * np.array([each for person in people for each in person.steps_s])
    return Row(
        what,
        clients,
        len(requests_ms),
        len(requests_ms) / seconds,
        sum(person.bytes for person in people) / seconds / 1e6,
        *(float(np.percentile(requests_ms, part)) for part in (50, 95)),
        *(float(np.percentile(steps_ms, part)) for part in (50, 95)),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100, help="of each client")
    parser.add_argument("--width", type=int, default=24_576)
    parser.add_argument("--height", type=int, default=18_432)
    parser.add_argument("--json", type=Path)
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
                raise SystemExit("tapfm view did not start: is it built? (make setup)")
            first = Client(address)
            (line,) = json.loads(first.ask("/api/collection"))["slides"]
            told = json.loads(first.ask(f"/api/slides/{line['key']}"))
            size = (told["width_px0"], told["height_px0"], told["last_level"], told["picture_px"])
            pyramid = Pyramid(line["key"], *size)
            rows = [measure(address, pyramid, what, arguments.clients, arguments.steps) for what in ("cold", "cached")]
        finally:
            server.terminate()
            server.wait(30)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(
        f"tapfm {tapfm.__version__}, {platform.machine()}, {cores} cores for server and clients together; "
        f"{arguments.width:,} x {arguments.height:,} px, pictures of {pyramid.picture_px} px, "
        f"{arguments.clients} clients, {arguments.steps} steps each\n"
    )
    print("| | requests | requests/s | MB/s | p50 ms | p95 ms | step p50 ms | step p95 ms |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row.what} | {row.requests:,} | {row.requests_per_second:,.0f} | {row.megabytes_per_second:,.0f} "
            f"| {row.p50_ms:.1f} | {row.p95_ms:.1f} | {row.step_p50_ms:.0f} | {row.step_p95_ms:.0f} |"
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()

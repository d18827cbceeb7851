"""Prefetching of tiles: same results in order for any number of workers, limited memory, crashed workers."""

import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
from slide_files import damage, section, write_slide

from tapfm.runtime.workers import WorkerPool
from tapfm.slides.opening import open_slide
from tapfm.tiles.reading import TileRequest
from tapfm.tiles.stream import TILES_PER_PART, TileStream, serve_requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    for i in range(3):
        write_slide(folder / f"s{i}.svs", section(640, 640, seed=i), mpp=0.5 if i else 0.25)
    return folder


def make_requests(folder, count=5, tiles=2 * TILES_PER_PART + 3, side_px0=96):
    rng = np.random.default_rng(0)
    return [
        TileRequest(f"s{i % 3}", folder / f"s{i % 3}.svs", rng.integers(0, 500, (tiles, 2)), side_px0, 48)
        for i in range(count)
    ]


def read_all(requests, workers, **arguments):
    with TileStream(requests, workers=workers, **arguments) as stream:
        return list(stream)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_same_tiles_in_order_for_any_number_of_workers(folder, workers):
    requests = make_requests(folder)
    results = read_all(requests, workers)
    assert [result.request.slide_id for result in results] == [request.slide_id for request in requests]
    for request, result in zip(requests, results, strict=True):
        slide = open_slide(request.path)
        expected = np.stack([slide.read(x, y, 96, 48).transpose(2, 0, 1) for x, y in request.positions.tolist()])
        assert np.array_equal(result.pixels, expected)
        assert result.rows.tolist() == list(range(len(request.positions)))
        assert result.failed == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_tiles_are_read_into_allocated_arrays(folder, workers):
    allocated = []

    def allocate(shape):
        allocated.append(np.zeros(shape, np.uint8))
        return allocated[-1]

    requests = make_requests(folder, count=3)
    expected, results = read_all(requests, 0), read_all(requests, workers, allocate=allocate)
    for array, result, reference in zip(allocated, results, expected, strict=True):
        assert np.shares_memory(array, result.pixels)
        assert np.array_equal(result.pixels, reference.pixels)


@pytest.mark.parametrize("workers", [1, 2])
def test_prefetching_is_limited_by_prefetch_bytes(folder, workers):
    generated = []

    def generate():
        for request in make_requests(folder, count=8, tiles=4):
            generated.append(request)
            yield request

    size = 4 * 3 * 48 * 48
    with TileStream(generate(), workers=workers, prefetch_bytes=2 * size) as stream:
        for count, _ in enumerate(stream, start=1):
            assert len(generated) <= count + 2
    assert len(generated) == 8


def test_request_larger_than_prefetch_bytes_is_read(folder):
    assert len(read_all(make_requests(folder), 1, prefetch_bytes=1)) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_slide_does_not_affect_other_requests(folder, tmp_path, workers):
    (tmp_path / "bad.svs").write_bytes(b"no slide")
    good = make_requests(folder, count=2)
    bad = [TileRequest("bad", tmp_path / name, good[0].positions, 96, 48) for name in ("bad.svs", "absent.svs")]
    first, no_slide, absent, last = read_all([good[0], *bad, good[1]], workers)
    assert first.failed == last.failed == 0
    for result in (no_slide, absent):
        assert result.failed == len(result.reasons) == len(good[0].positions)
        assert len(result.pixels) == len(result.rows) == 0
        assert result.reasons[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_tiles_in_a_damaged_block_are_skipped(tmp_path, workers):
    path = write_slide(tmp_path / "s.svs", section(640, 640), downsamples=(1,))
    positions = [(x, y) for y in range(0, 640, 64) for x in range(0, 640, 64)]
    request = TileRequest("s", path, np.array(positions), 64, 64)
    (before,) = read_all([request], 0)
    damage(path, [4])  # x and y from 256 to 512: 16 tiles
    (result,) = read_all([request], workers)
    lost = [i for i, (x, y) in enumerate(positions) if 256 <= x < 512 and 256 <= y < 512]
    assert len(lost) == 16
    assert sorted(set(range(100)) - set(result.rows.tolist())) == lost
    assert np.array_equal(result.pixels, before.pixels[result.rows])
    assert len(result.reasons) == 16
    assert "s.svs" in result.reasons[0]


def test_crashed_workers_are_replaced_and_their_tiles_retried(folder):
    requests = make_requests(folder, count=6)
    expected = read_all(requests, 0)
    before = set(multiprocessing.active_children())
    with TileStream(requests, workers=2, prefetch_bytes=1) as stream:
        results = [next(stream)]
        workers = set(multiprocessing.active_children()) - before
        assert len(workers) == 2
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        results += stream
    assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(expected, results, strict=True))


def test_close_stops_the_workers(folder):
    before = set(multiprocessing.active_children())
    stream = TileStream(make_requests(folder, count=50), workers=2)
    next(stream)
    stream.close()
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize(("pool_size", "workers"), [(2, 1), (1, 2), (2, 0)])
def test_workers_of_a_pool_are_used_first(folder, pool_size, workers):
    requests = make_requests(folder)
    before = set(multiprocessing.active_children())
    with closing(WorkerPool(pool_size, serve_requests)) as pool:
        in_pool = set(multiprocessing.active_children()) - before
        with TileStream(requests, workers=workers, pool=pool) as stream:
            results = list(stream)
            used = set(multiprocessing.active_children()) - before
    assert len(used) == workers
    assert len(used & in_pool) == min(pool_size, workers)
    assert set(multiprocessing.active_children()) <= before
    assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(read_all(requests, 0), results, strict=True))


def test_errors_of_the_request_generator_are_raised(folder):
    def generate():
        yield make_requests(folder)[0]
        raise ZeroDivisionError

    with TileStream(generate(), workers=1) as stream, pytest.raises(ZeroDivisionError):
        list(stream)


def test_wait_time_is_measured(folder):
    with TileStream(make_requests(folder), workers=0) as stream:
        list(stream)
        assert stream.waited_s > 0


def test_stream_works_in_scripts_without_main_guard(folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"""
from pathlib import Path
import numpy as np
from tapfm.tiles.reading import TileRequest
from tapfm.tiles.stream import TileStream
print("once")
request = TileRequest("s0", Path({str(folder / "s0.svs")!r}), np.zeros((3, 2), int), 96, 48)
with TileStream([request], workers=2) as stream:
    print([result.failed for result in stream])
""")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert result.stdout == "once\n[0]\n", result.stderr

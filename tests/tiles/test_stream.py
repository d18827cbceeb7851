"""Tiles read ahead: the same for any number of workers, in order, within bounds, whatever dies."""

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


def requests(folder, count=5, tiles=2 * TILES_PER_PART + 3, side_px0=96):
    rng = np.random.default_rng(0)
    return [
        TileRequest(f"s{i % 3}", folder / f"s{i % 3}.svs", rng.integers(0, 500, (tiles, 2)), side_px0, 48)
        for i in range(count)
    ]


def read_all(wanted, workers, **arguments):
    with TileStream(wanted, workers=workers, **arguments) as stream:
        return list(stream)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_tile_comes_in_its_place_for_any_number_of_workers(folder, workers):
    wanted = requests(folder)
    found = read_all(wanted, workers)
    assert [read.request.slide_id for read in found] == [request.slide_id for request in wanted]
    for request, read in zip(wanted, found, strict=True):
        slide = open_slide(request.path)
        expected = np.stack([slide.read(x, y, 96, 48).transpose(2, 0, 1) for x, y in request.positions.tolist()])
        assert np.array_equal(read.pixels, expected)
        assert read.rows.tolist() == list(range(len(request.positions)))
        assert read.failed == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_tiles_are_read_into_the_memory_that_is_given_for_them(folder, workers):
    given = []

    def allocate(shape):
        given.append(np.zeros(shape, np.uint8))
        return given[-1]

    wanted = requests(folder, count=3)
    expected, found = read_all(wanted, 0), read_all(wanted, workers, allocate=allocate)
    for memory, read, plain in zip(given, found, expected, strict=True):
        assert np.shares_memory(memory, read.pixels)
        assert np.array_equal(read.pixels, plain.pixels)


@pytest.mark.parametrize("workers", [1, 2])
def test_no_more_is_read_ahead_than_the_bound_allows(folder, workers):
    asked = []

    def generate():
        for request in requests(folder, count=8, tiles=4):
            asked.append(request)
            yield request

    size = 4 * 3 * 48 * 48
    with TileStream(generate(), workers=workers, prefetch_bytes=2 * size) as stream:
        for taken, _ in enumerate(stream, start=1):
            assert len(asked) <= taken + 2
    assert len(asked) == 8


def test_a_request_larger_than_the_bound_is_read_all_the_same(folder):
    assert len(read_all(requests(folder), 1, prefetch_bytes=1)) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slide_that_cannot_be_opened_costs_its_own_tiles_only(folder, tmp_path, workers):
    (tmp_path / "bad.svs").write_bytes(b"no slide")
    good = requests(folder, count=2)
    bad = [TileRequest("bad", tmp_path / name, good[0].positions, 96, 48) for name in ("bad.svs", "absent.svs")]
    first, no_slide, absent, last = read_all([good[0], *bad, good[1]], workers)
    assert first.failed == last.failed == 0
    for read in (no_slide, absent):
        assert read.failed == len(read.reasons) == len(good[0].positions)
        assert len(read.pixels) == len(read.rows) == 0
        assert read.reasons[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_tiles_on_a_damaged_block_are_skipped_and_the_others_move_up(tmp_path, workers):
    path = write_slide(tmp_path / "s.svs", section(640, 640), downsamples=(1,))
    whole = [(x, y) for y in range(0, 640, 64) for x in range(0, 640, 64)]
    request = TileRequest("s", path, np.array(whole), 64, 64)
    (before,) = read_all([request], 0)
    damage(path, [4])  # x and y from 256 to 512: 16 tiles
    (read,) = read_all([request], workers)
    lost = [i for i, (x, y) in enumerate(whole) if 256 <= x < 512 and 256 <= y < 512]
    assert len(lost) == 16
    assert sorted(set(range(100)) - set(read.rows.tolist())) == lost
    assert np.array_equal(read.pixels, before.pixels[read.rows])
    assert len(read.reasons) == 16
    assert "s.svs" in read.reasons[0]


def test_a_worker_that_dies_is_replaced_and_its_tiles_are_read_again(folder):
    wanted = requests(folder, count=6)
    expected = read_all(wanted, 0)
    before = set(multiprocessing.active_children())
    with TileStream(wanted, workers=2, prefetch_bytes=1) as stream:
        found = [next(stream)]
        workers = set(multiprocessing.active_children()) - before
        assert len(workers) == 2
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        found += stream
    assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(expected, found, strict=True))


def test_closing_early_ends_the_workers(folder):
    before = set(multiprocessing.active_children())
    stream = TileStream(requests(folder, count=50), workers=2)
    next(stream)
    stream.close()
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize(("hired", "workers"), [(2, 1), (1, 2), (2, 0)])
def test_workers_that_were_hired_before_read_the_same(folder, hired, workers):
    wanted = requests(folder)
    before = set(multiprocessing.active_children())
    with closing(WorkerPool(hired, serve_requests)) as pool:
        ahead = set(multiprocessing.active_children()) - before
        with TileStream(wanted, workers=workers, pool=pool) as stream:
            found = list(stream)
            employed = set(multiprocessing.active_children()) - before
    assert len(employed) == workers
    assert len(employed & ahead) == min(hired, workers)
    assert set(multiprocessing.active_children()) <= before
    assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(read_all(wanted, 0), found, strict=True))


def test_what_goes_wrong_with_the_plan_is_told_to_who_reads(folder):
    def generate():
        yield requests(folder)[0]
        raise ZeroDivisionError

    with TileStream(generate(), workers=1) as stream, pytest.raises(ZeroDivisionError):
        list(stream)


def test_waiting_is_counted(folder):
    with TileStream(requests(folder), workers=0) as stream:
        list(stream)
        assert stream.waited_s > 0


def test_scripts_without_a_main_guard_can_read_ahead(folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"""
from pathlib import Path
import numpy as np
from tapfm.tiles.reading import TileRequest
from tapfm.tiles.stream import TileStream
print("once")
request = TileRequest("s0", Path({str(folder / "s0.svs")!r}), np.zeros((3, 2), int), 96, 48)
with TileStream([request], workers=2) as stream:
    print([read.failed for read in stream])
""")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert result.stdout == "once\n[0]\n", result.stderr

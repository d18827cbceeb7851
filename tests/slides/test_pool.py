"""Slide pool: works in forked and spawned workers, limits open slides, does not leak."""

import multiprocessing
import os
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from slide_files import section, write_scn, write_slide

from tapfm.errors import TileReadError
from tapfm.slides.pool import SlidePool
from tapfm.slides.readers.openslide import OpenSlideSlide
from tapfm.slides.readers.tiff import open_tiff


@pytest.fixture
def slides(tmp_path):
    fast = write_slide(tmp_path / "fast.svs", section(1200, 1200))
    slow = write_scn(tmp_path / "slow.scn", [(0, 0, section(1024, 1024, tissue=(0, 0, 1, 1)))], (2048, 2048))
    return [fast, slow]


def read_all(pool, paths, connection):
    connection.send([pool.get(path).read(300, 300, 448, 224) for path in paths])
    connection.close()


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_used_pool_works_in_workers(slides, start_method):
    pool = SlidePool()
    expected = [pool.get(path).read(300, 300, 448, 224) for path in slides]
    context = multiprocessing.get_context(start_method)
    for _ in range(2):
        receiver, sender = context.Pipe()
        worker = context.Process(target=read_all, args=(pool, slides, sender))
        worker.start()
        sender.close()
        for tile, worker_tile in zip(expected, receiver.recv(), strict=True):
            np.testing.assert_array_equal(tile, worker_tile)
        worker.join()
        assert worker.exitcode == 0
    for path, tile in zip(slides, expected, strict=True):
        np.testing.assert_array_equal(pool.get(path).read(300, 300, 448, 224), tile)


def test_least_recently_used_slide_is_dropped_and_closed_without_references(tmp_path):
    paths = [write_slide(tmp_path / f"{i}.svs", section(300, 300, seed=i), downsamples=(1,)) for i in range(4)]
    pool = SlidePool(max_open=2)
    referenced, unreferenced = pool.get(paths[0]), weakref.ref(pool.get(paths[1]))
    assert pool.get(paths[0]) is referenced
    pool.get(paths[2])  # drops slide 1
    assert unreferenced() is None
    pool.get(paths[3])
    pool.get(paths[2])  # drops slide 0, which is referenced here
    assert list(pool._open) == [paths[3], paths[2]]
    assert referenced.read(0, 0, 100, 50).shape == (50, 50, 3)
    referenced.close()
    with pytest.raises(TileReadError, match="closed file"):
        referenced.read(0, 0, 100, 50)


def test_threads_can_read_more_slides_than_max_open(tmp_path):
    area = section(1024, 1024, tissue=(0, 0, 1, 1))
    paths = [write_scn(tmp_path / f"{i}.scn", [(0, 0, area)], (2048, 2048)) for i in range(4)]
    paths += [write_slide(tmp_path / f"{i}.svs", area) for i in range(4)]
    expected = {path: SlidePool().get(path).read(300, 300, 448, 224) for path in paths}
    pool = SlidePool(max_open=2)
    order = [paths[i] for i in np.random.default_rng(0).integers(0, 8, 300)]
    with ThreadPoolExecutor(4) as threads:
        for path, tile in zip(order, threads.map(lambda p: pool.get(p).read(300, 300, 448, 224), order), strict=True):
            np.testing.assert_array_equal(tile, expected[path])


def test_pickled_pool_has_no_handles(slides):
    pool = SlidePool(max_open=3, cache_bytes=1000)
    pool.get(slides[0])
    copy = pickle.loads(pickle.dumps(pool))
    assert (copy.max_open, copy.cache_bytes, len(copy._open)) == (3, 1000, 0)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("reader", [open_tiff, OpenSlideSlide])
def test_ten_thousand_reads_do_not_leak(tmp_path, reader):
    path = write_slide(tmp_path / "s.svs", section(2048, 2048, nuclei_per_mpx=100), downsamples=(1,), tile_px=64)
    cache_bytes = 500_000  # much less than the decoded slide of 12 MB
    slide = reader(path, cache_bytes)
    positions = np.random.default_rng(0).integers(0, 1984, (10_000, 2)).tolist()
    for x, y in positions[:2000]:
        slide.read(x, y, 64, 32)
    before, files = resident_bytes(), len(list(Path("/proc/self/fd").iterdir()))
    for x, y in positions[2000:]:
        slide.read(x, y, 64, 32)
    assert resident_bytes() - before < 8_000_000
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    if reader is open_tiff:
        assert sum(pixels.nbytes for pixels in slide._cache.values()) == slide._cached_bytes <= cache_bytes

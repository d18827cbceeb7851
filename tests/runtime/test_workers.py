"""Worker processes: crashes, early stop, and pools."""

import multiprocessing
import os
import signal
from contextlib import closing

import pytest

from tapfm.runtime.workers import WorkerCrash, WorkerPool, choose_worker_count, map_isolated, serve_function


def behave(item):
    if item == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if item == "memory":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "exit":
        os._exit(7)
    if item == "forever":
        signal.pause()
    return f"{item} done by {os.getpid()}"


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_crash_affects_only_its_item(workers):
    items = ["a", "segfault", "b", "memory", "exit", "c", "segfault", "d"]
    results = dict(map_isolated(behave, enumerate(items), workers))
    assert sorted(results) == list(range(8))
    assert [str(results[i]).split()[0] for i in (0, 2, 5, 7)] == ["a", "b", "c", "d"]
    assert "SIGSEGV" in results[1].reason
    assert "SIGKILL (out of memory?)" in results[3].reason
    assert "code 7" in results[4].reason
    assert isinstance(results[6], WorkerCrash)


def test_closing_the_generator_stops_the_workers():
    results = map_isolated(behave, enumerate(["a", "forever", "forever"]), 2)
    _, answer = next(results)
    pid = int(answer.split()[-1])
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(("started", "workers", "used"), [(1, 2, 1), (3, 2, 2)])
def test_workers_of_a_pool_are_used_first_and_unused_ones_are_stopped(started, workers, used):
    before = set(multiprocessing.active_children())
    with closing(WorkerPool(started, serve_function, behave)) as pool:
        pids = {process.pid for process in set(multiprocessing.active_children()) - before}
        results = dict(map_isolated(behave, enumerate(["a", "b"]), workers, pool))
    assert len({int(answer.split()[-1]) for answer in results.values()} & pids) == used
    assert set(multiprocessing.active_children()) <= before


def test_unused_pool_is_stopped():
    before = set(multiprocessing.active_children())
    with closing(WorkerPool(2, serve_function, behave)) as pool:
        assert len(set(multiprocessing.active_children()) - before) == 2
        assert list(map_isolated(behave, [], 3, pool)) == []
    assert set(multiprocessing.active_children()) <= before


def test_no_items_give_no_results():
    assert list(map_isolated(behave, [], 3)) == []


def test_items_are_consumed_when_a_worker_is_free():
    taken = []

    def items():
        for name in "abcd":
            taken.append(name)
            yield name, name

    results = map_isolated(behave, items(), 1)
    key, _ = next(results)
    assert key == "a"
    assert taken == ["a"]
    assert [key for key, _ in results] == ["b", "c", "d"]


def test_error_in_the_items_keeps_results_and_stops_the_workers():
    def items():
        yield 0, "a"
        raise OSError("no claim")

    before = set(multiprocessing.active_children())
    results = map_isolated(behave, items(), 1)
    key, answer = next(results)
    assert (key, answer.split()[0]) == (0, "a")
    with pytest.raises(OSError, match="no claim"):
        next(results)
    assert set(multiprocessing.active_children()) <= before


def test_zero_workers_run_in_this_process():
    results = dict(map_isolated(behave, enumerate(["a", "b"]), 0))
    assert {int(answer.split()[-1]) for answer in results.values()} == {os.getpid()}


def test_worker_count_defaults_to_one_per_core(monkeypatch):
    monkeypatch.setattr("tapfm.runtime.workers.available_cores", lambda: 7)
    assert [choose_worker_count(workers) for workers in (None, 0, 3)] == [7, 0, 3]

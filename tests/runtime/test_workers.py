"""A worker that dies costs one item."""

import multiprocessing
import os
import signal
from contextlib import closing

import pytest

from tapfm.runtime.workers import Crew, Died, answer_items, run_isolated


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
def test_a_crash_costs_that_item_only(workers):
    items = ["a", "segfault", "b", "memory", "exit", "c", "segfault", "d"]
    results = dict(run_isolated(behave, items, workers))
    assert sorted(results) == list(range(8))
    assert [str(results[i]).split()[0] for i in (0, 2, 5, 7)] == ["a", "b", "c", "d"]
    assert "SIGSEGV" in results[1].reason
    assert "SIGKILL (out of memory?)" in results[3].reason
    assert "code 7" in results[4].reason
    assert isinstance(results[6], Died)


def test_stopping_early_ends_the_workers():
    results = run_isolated(behave, ["a", "forever", "forever"], 2)
    _, answer = next(results)
    pid = int(answer.split()[-1])
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(("hired", "workers", "employed"), [(1, 2, 1), (3, 2, 2)])
def test_those_who_were_hired_before_work_first_and_no_more_than_are_needed(hired, workers, employed):
    before = set(multiprocessing.active_children())
    with closing(Crew(hired, answer_items, behave)) as crew:
        pids = {process.pid for process in set(multiprocessing.active_children()) - before}
        results = dict(run_isolated(behave, ["a", "b"], workers, crew))
    assert len({int(answer.split()[-1]) for answer in results.values()} & pids) == employed
    assert set(multiprocessing.active_children()) <= before


def test_a_crew_that_nobody_asks_is_ended():
    before = set(multiprocessing.active_children())
    with closing(Crew(2, answer_items, behave)) as crew:
        assert len(set(multiprocessing.active_children()) - before) == 2
        assert list(run_isolated(behave, [], 3, crew)) == []
    assert set(multiprocessing.active_children()) <= before


def test_nothing_to_do():
    assert list(run_isolated(behave, [], 3)) == []

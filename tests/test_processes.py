"""A worker that dies costs one item."""

import os
import signal

import pytest

from tapfm.processes import Died, run_isolated


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


def test_nothing_to_do():
    assert list(run_isolated(behave, [], 3)) == []

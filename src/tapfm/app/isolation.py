"""Work in processes that may die: each item runs in one of a few, and a crash costs that item only.

`concurrent.futures` gives up on everything when a worker dies; a damaged slide can do that to a C library.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Died:
    """What is known of an item whose process died."""

    reason: str


@dataclass
class Worker(Generic[Item]):
    """A process, the line to it, and what it is working on."""

    process: BaseProcess
    line: Connection
    index: int | None = None


def run_isolated(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Generator[tuple[int, Result | Died], None, None]:
    """Apply a function to all items in `workers` processes; gives (index, result) as they come.

    Function and items are pickled. Closing the iterator, or an exception in the caller, ends the processes.
    """
    context = multiprocessing.get_context("spawn")  # forking a process with threads in C libraries is asking for it
    waiting = iter(range(len(items)))
    crew: list[Worker[Item]] = []

    def hire() -> Worker[Item]:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(function, theirs), daemon=True)
        process.start()
        theirs.close()  # so that the worker's end is its own, and its death is the end of the line
        return Worker(process, ours)

    def assign(worker: Worker[Item]) -> bool:
        worker.index = next(waiting, None)
        if worker.index is None:
            return False
        # a worker that died while it had nothing to do is noticed by the wait below
        with contextlib.suppress(BrokenPipeError):
            worker.line.send(items[worker.index])
        return True

    try:
        for _ in range(min(workers, len(items))):
            crew.append(hire())
        busy = [worker for worker in crew if assign(worker)]
        while busy:
            for line in wait([worker.line for worker in busy]):
                worker = next(each for each in busy if each.line is line)
                index = worker.index
                assert index is not None
                try:
                    answer: Result | Died = worker.line.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    answer = Died(death_of(worker.process.exitcode))
                    crew.remove(worker)
                    busy.remove(worker)
                    worker = hire()
                    crew.append(worker)
                    busy.append(worker)
                if not assign(worker):
                    busy.remove(worker)
                yield index, answer
    finally:
        for worker in crew:
            worker.line.close()  # an idle worker leaves by itself
            worker.process.terminate()
        for worker in crew:
            worker.process.join()


def work(function: Callable[[Any], Any], line: Connection) -> None:
    """Answer items until the line closes; runs in the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it ends the workers
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        while True:
            line.send(function(line.recv()))


def death_of(exit_code: int | None) -> str:
    """Say how a process ended."""
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        advice = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the process that read it was killed by {name}{advice}"
    return f"the process that read it ended with code {exit_code}"

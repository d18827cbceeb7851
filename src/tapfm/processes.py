"""Work in processes that may die: each item runs in one of a few, and a crash costs that item only.

`concurrent.futures` gives up on everything when a worker dies; a damaged slide can do that to a C library.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

PATIENCE_S = 5.0
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Died:
    """What is known of an item whose process died."""

    reason: str


@dataclass
class Worker:
    """A process, the line to it, and the item it is working on."""

    process: BaseProcess
    line: Connection
    index: int

    def end(self) -> int | None:
        """Stop it, if it has not stopped by itself, and say how it ended."""
        self.line.close()
        self.process.terminate()
        self.process.join(PATIENCE_S)  # a process that waits for a dead drive cannot even be killed
        return self.process.exitcode


def run_isolated(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Generator[tuple[int, Result | Died], None, None]:
    """Apply a function to all items in `workers` processes; gives (index, result) as they come.

    Function and items are pickled. Closing the iterator, or an exception in the caller, ends the processes.
    """
    waiting = deque(range(len(items)))
    busy: dict[Connection, Worker] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                worker = hire(function)
                busy[worker.line] = worker
                give(worker, waiting.popleft(), items)
            for line in wait(list(busy)):
                assert isinstance(line, Connection)
                worker = busy[line]
                index = worker.index
                try:
                    answer: Result | Died = line.recv()
                except Exception:  # the end of the line, or half an answer
                    del busy[line]
                    answer = Died(death_of(worker.end()))
                else:
                    if waiting:
                        give(worker, waiting.popleft(), items)
                    else:
                        del busy[line]
                        worker.end()
                yield index, answer
    finally:
        for worker in busy.values():
            worker.end()


def hire(function: Callable[[Any], Any]) -> Worker:
    """Start a process."""
    context = multiprocessing.get_context("spawn")  # forking a process with threads in C libraries is asking for it
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(function, theirs), daemon=True)
    with ignoring_interrupts():
        process.start()
    theirs.close()  # so that the worker's end is its own, and its death is the end of the line
    return Worker(process, ours, index=-1)


def give(worker: Worker, index: int, items: Sequence[Any]) -> None:
    """Send an item to a worker; one that has died meanwhile is noticed when its line is read."""
    worker.index = index
    with contextlib.suppress(BrokenPipeError):
        worker.line.send(items[index])


@contextlib.contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Let a process be born deaf to Ctrl-C, which is the parent's to handle: it ends the workers."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set it
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def work(function: Callable[[Any], Any], line: Connection) -> None:
    """Answer items until the line closes; runs in the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=die_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        while True:
            line.send(function(line.recv()))


def die_with_parent() -> None:
    """End this process when its parent is gone: an orphan would write into a folder that is another run's by then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def death_of(exit_code: int | None) -> str:
    """Say how a process ended."""
    if exit_code is not None and exit_code < 0:
        names = {each.value: each.name for each in signal.Signals}
        name = names.get(-exit_code, f"signal {-exit_code}")
        advice = " (out of memory?)" if name == "SIGKILL" else ""
        return f"its process was killed by {name}{advice}"
    return f"its process ended with code {exit_code}"

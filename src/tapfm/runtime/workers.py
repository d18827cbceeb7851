"""Work in processes that may die: each item runs in one of a few, and a crash costs that item only.

`concurrent.futures` gives up on everything when a worker dies; a damaged slide can do that to a C library.
Workers are spawned without the caller's main module, so that scripts need no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
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
    index: int = -1

    def end(self) -> int | None:
        """Stop it, if it has not stopped by itself, and say how it ended."""
        self.line.close()
        self.process.kill()  # it is deaf to anything less
        self.process.join(PATIENCE_S)  # a process that waits for a dead drive cannot even be killed
        return self.process.exitcode


class Crew:
    """Workers hired before there is anything for them to do: they start while something else is waited for."""

    def __init__(self, workers: int, serve: Callable[..., None], *arguments: Any) -> None:
        self._workers = [hire(serve, *arguments) for _ in range(workers)]

    def give(self, most: int) -> list[Worker]:
        """Hand over at most so many, for whoever takes them to end; the others are not needed."""
        given, self._workers = self._workers[:most], self._workers[most:]
        self.close()
        return given

    def close(self) -> None:
        """End those that were not handed over."""
        while self._workers:
            self._workers.pop().end()


def run_isolated(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int, crew: Crew | None = None
) -> Generator[tuple[int, Result | Died], None, None]:
    """Apply a function to all items in `workers` processes; gives (index, result) as they come.

    Function and items are pickled. Closing the iterator, or an exception in the caller, ends the processes. The first
    are those of a `crew` that answers items with this function.
    """
    hired = [] if crew is None else crew.give(min(workers, len(items)))
    waiting = deque(range(len(items)))
    busy: dict[Connection, Worker] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                worker = hired.pop() if hired else hire(answer_items, function)
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
        for worker in [*busy.values(), *hired]:
            worker.end()


def hire(serve: Callable[..., None], *arguments: Any) -> Worker:
    """Start a process that runs `serve(line, *arguments)`; both are pickled, `serve` by its name."""
    context = multiprocessing.get_context("spawn")  # forking a process with threads in C libraries is asking for it
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(serve, theirs, arguments), daemon=True)
    with ignoring_interrupts(), without_main_module():
        process.start()
    theirs.close()  # so that the worker's end is its own, and its death is the end of the line
    return Worker(process, ours)


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


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
    """Hide the caller's main module, which a spawned process would otherwise run once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def work(serve: Callable[..., None], line: Connection, arguments: tuple[Any, ...]) -> None:
    """Serve until the line closes; runs in the worker."""
    # schedulers and terminals signal the whole group; when to end is the parent's to decide
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=die_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        serve(line, *arguments)


def answer_items(line: Connection, function: Callable[[Any], Any]) -> None:
    """Answer items one by one."""
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


def available_cores() -> int:
    """Count the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

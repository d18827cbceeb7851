"""Worker processes that may crash: each item runs in one of a few processes, and a crash costs that item only.

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
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

_JOIN_TIMEOUT_S = 5.0
Key = TypeVar("Key")
Item = TypeVar("Item")
Result = TypeVar("Result")


def count_workers(workers: int | None) -> int:
    """Return how many worker processes to start: None is one per core, 0 is none (all work in this process)."""
    return available_cores() if workers is None else workers


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class WorkerDied:
    """The result of an item whose process crashed."""

    reason: str


@dataclass
class Worker:
    """A process and the connection to it."""

    process: BaseProcess
    connection: Connection

    def stop(self) -> int | None:
        """Stop the process and return its exit code."""
        self.connection.close()
        self.process.kill()  # it ignores SIGINT and SIGTERM
        self.process.join(_JOIN_TIMEOUT_S)  # a process that waits for a dead drive cannot even be killed
        return self.process.exitcode

    def send(self, item: Any) -> None:
        """Send an item; if the process has died meanwhile, the next receive fails."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(item)


class WorkerPool:
    """Worker processes that start before there is work for them."""

    def __init__(self, workers: int, serve: Callable[..., None], *arguments: Any) -> None:
        self._workers = [start_worker(serve, *arguments) for _ in range(workers)]

    def take(self, most: int) -> list[Worker]:
        """Return at most that many workers, which the caller has to stop; the others are stopped here."""
        taken, self._workers = self._workers[:most], self._workers[most:]
        self.close()
        return taken

    def close(self) -> None:
        """Stop the workers that nobody took."""
        while self._workers:
            self._workers.pop().stop()


def map_isolated(
    function: Callable[[Item], Result],
    items: Iterable[tuple[Key, Item]],
    workers: int,
    pool: WorkerPool | None = None,
) -> Generator[tuple[Key, Result | WorkerDied], None, None]:
    """Apply a function to items in worker processes; yields (key, result) as they finish.

    Items are taken when a worker is free for them. Function and items are pickled. Closing the generator, or an
    exception in the caller, stops the processes. The first workers are those of `pool`, which must serve this
    function. With 0 workers the function runs in this process, where a crash is not isolated.
    """
    if not workers:
        for key, item in items:
            yield key, function(item)
        return
    waiting = iter(items)
    spare = [] if pool is None else pool.take(workers)
    busy: dict[Connection, tuple[Worker, Key]] = {}

    def employ(worker: Worker | None = None) -> bool:
        """Send the next item to a worker, or to a new one; return False when there are no more items."""
        for key, item in waiting:
            worker = worker or (spare.pop() if spare else start_worker(serve_function, function))
            busy[worker.connection] = worker, key
            worker.send(item)
            return True
        return False

    try:
        while len(busy) < workers and employ():
            pass
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                worker, key = busy[connection]
                try:
                    result: Result | WorkerDied = connection.recv()
                except Exception:  # the connection is closed, or half an answer came
                    del busy[connection]
                    yield key, WorkerDied(describe_exit(worker.stop()))
                    employ()
                else:
                    yield key, result
                    if not employ(worker):
                        del busy[connection]
                        worker.stop()
    finally:
        for worker in [*spare, *(worker for worker, _ in busy.values())]:
            worker.stop()


def start_worker(serve: Callable[..., None], *arguments: Any) -> Worker:
    """Start a process that runs `serve(connection, *arguments)`; both are pickled, `serve` by its name."""
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of C libraries hold
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(serve, theirs, arguments), daemon=True)
    with _ignore_interrupts(), _hide_main_module():
        process.start()
    theirs.close()  # so that the connection ends when the worker dies
    return Worker(process, ours)


def serve_function(connection: Connection, function: Callable[[Any], Any]) -> None:
    """Apply a function to each item that comes; runs in a worker."""
    while True:
        connection.send(function(connection.recv()))


def describe_exit(exit_code: int | None) -> str:
    """Return how a process ended, for a message."""
    if exit_code is not None and exit_code < 0:
        names = {each.value: each.name for each in signal.Signals}
        name = names.get(-exit_code, f"signal {-exit_code}")
        advice = " (out of memory?)" if name == "SIGKILL" else ""
        return f"its process was killed by {name}{advice}"
    return f"its process ended with code {exit_code}"


@contextlib.contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, so that a process started now ignores it too: the parent stops its workers."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set it
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _hide_main_module() -> Iterator[None]:
    """Hide the caller's main module, which a spawned process would otherwise run once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _work(serve: Callable[..., None], connection: Connection, arguments: tuple[Any, ...]) -> None:
    """Serve until the connection closes; runs in the worker."""
    # schedulers and terminals signal the whole group; the parent decides when to stop
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        serve(connection, *arguments)


def _exit_with_parent() -> None:
    """End this process when its parent is gone: an orphan would write into a folder that another command may use."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)

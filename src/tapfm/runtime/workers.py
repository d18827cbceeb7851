"""Crash-isolated worker processes: a crash only affects the item that was being processed.

A damaged slide can crash a C library, and with it the worker process. A `concurrent.futures.ProcessPoolExecutor` would
then fail for all remaining items. Workers are spawned without the caller's main module, so that scripts that use tapfm
need no `if __name__ == "__main__"`.
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

_EXIT_AFTER_KILL_TIMEOUT_S = 5.0  # how long to wait for a killed worker to exit
Key = TypeVar("Key")
Item = TypeVar("Item")
Result = TypeVar("Result")


def choose_worker_count(workers: int | None) -> int:
    """Return `workers`, or the number of available cores if it is None. 0: all work runs in this process."""
    return available_cores() if workers is None else workers


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class WorkerCrash:
    """Result of an item whose worker process crashed."""

    reason: str


@dataclass
class Worker:
    """A worker process and the connection to it."""

    process: BaseProcess
    connection: Connection

    def stop(self) -> int | None:
        """Stop the process and return its exit code."""
        self.connection.close()
        self.process.kill()  # workers ignore SIGINT and SIGTERM
        self.process.join(_EXIT_AFTER_KILL_TIMEOUT_S)  # a process blocked on a dead drive cannot be killed
        return self.process.exitcode

    def send(self, item: Any) -> None:
        """Send an item to the process. If the process has died, this does not fail, but receiving the result does."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(item)


class WorkerPool:
    """Worker processes that are started before there is work for them.

    Each worker runs `serve(connection, *arguments)`; see `start_worker`.
    """

    def __init__(self, workers: int, serve: Callable[..., None], *arguments: Any) -> None:
        self._workers = [start_worker(serve, *arguments) for _ in range(workers)]

    def take_workers(self, limit: int) -> list[Worker]:
        """Return up to `limit` of the workers, and stop the others. The caller must stop the returned workers."""
        taken, self._workers = self._workers[:limit], self._workers[limit:]
        self.close()
        return taken

    def close(self) -> None:
        """Stop the workers that `take_workers` has not returned."""
        while self._workers:
            self._workers.pop().stop()


def map_isolated(
    function: Callable[[Item], Result],
    items: Iterable[tuple[Key, Item]],
    workers: int,
    pool: WorkerPool | None = None,
) -> Generator[tuple[Key, Result | WorkerCrash], None, None]:
    """Apply a function to (key, item) pairs in worker processes; yield (key, result) as the items finish.

    The next item is taken from `items` when a worker is free. Function and items are pickled. The processes are stopped
    when the generator ends or is closed. With 0 workers the function runs in this process, without isolation.

    pool: started workers to use first; they must run `serve_function` with the same function.
    """
    if not workers:
        for key, item in items:
            yield key, function(item)
        return
    remaining = iter(items)
    idle = [] if pool is None else pool.take_workers(workers)
    busy: dict[Connection, tuple[Worker, Key]] = {}

    def send_next_item(worker: Worker | None = None) -> bool:
        """Send the next item to `worker`; None: to an idle or new worker. Return False if no items remain."""
        for key, item in remaining:
            worker = worker or (idle.pop() if idle else start_worker(serve_function, function))
            busy[worker.connection] = worker, key
            worker.send(item)
            return True
        return False

    try:
        while len(busy) < workers and send_next_item():
            pass
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                worker, key = busy[connection]
                try:
                    result: Result | WorkerCrash = connection.recv()
                except Exception:  # the worker died, possibly while it was sending a result
                    del busy[connection]
                    yield key, WorkerCrash(describe_exit(worker.stop()))
                    send_next_item()
                else:
                    yield key, result
                    if not send_next_item(worker):
                        del busy[connection]
                        worker.stop()
    finally:
        for worker in [*idle, *(worker for worker, _ in busy.values())]:
            worker.stop()


def start_worker(serve: Callable[..., None], *arguments: Any) -> Worker:
    """Start a process that runs `serve(connection, *arguments)`. The arguments are pickled.

    serve: a function at the top level of a module.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy locks held by threads of C libraries
    parent_end, worker_end = context.Pipe()
    process = context.Process(target=_run_worker, args=(serve, worker_end, arguments), daemon=True)
    with _ignore_interrupts(), _hide_main_module():
        process.start()
    worker_end.close()  # so that the connection closes when the worker dies
    return Worker(process, parent_end)


def serve_function(connection: Connection, function: Callable[[Any], Any]) -> None:
    """Apply a function to each received item and send the result back. Runs in a worker."""
    while True:
        connection.send(function(connection.recv()))


def describe_exit(exit_code: int | None) -> str:
    """Return how a process ended, as text for a message."""
    if exit_code is not None and exit_code < 0:
        names = {each.value: each.name for each in signal.Signals}
        name = names.get(-exit_code, f"signal {-exit_code}")
        possible_cause = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the process was killed by {name}{possible_cause}"
    return f"the process ended with exit code {exit_code}"


@contextlib.contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C while a worker is started. The worker inherits this: only the parent process may stop it."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set signal handlers
        yield
        return
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


@contextlib.contextmanager
def _hide_main_module() -> Iterator[None]:
    """Hide the caller's main module, which a spawned process would otherwise import and run."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _run_worker(serve: Callable[..., None], connection: Connection, arguments: tuple[Any, ...]) -> None:
    """Call `serve`, which returns or fails when the connection closes. Runs in the worker."""
    # schedulers and terminals signal the whole process group; the parent decides when the worker stops
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has exited
        serve(connection, *arguments)


def _exit_with_parent() -> None:
    """Exit when the parent process exits, so that an orphan does not write to a folder that is no longer locked."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)

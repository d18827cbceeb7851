"""Prefetch tiles: worker processes read the next requests in advance, across slides, with limited memory.

Results are returned in the order of the requests for any number of workers. With 0 workers, requests are read when they
are needed. If a worker crashes on a damaged slide, its tiles are retried once and then skipped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType

import numpy as np

from tapfm.runtime.workers import Worker, WorkerPool, describe_exit, start_worker
from tapfm.slides.pool import SlidePool
from tapfm.tiles.reading import Allocate, TilePixels, TileReadResult, TileRequest, allocate_array, read_request

# Tiles that a worker reads at a time: enough that opening the slide takes little of the time, few enough that a crash
# loses few tiles.
TILES_PER_PART = 32
_MAX_ATTEMPTS = 2  # per part; only parts whose worker crashed are retried
_TIMEOUT_S = 300.0  # for a part; a hanging network drive must not block the run forever
_MAX_OPEN_SLIDES, _CACHE_BYTES = 3, 16 * 2**20  # per worker


@dataclass
class _PartialRequest:
    """Tiles `start` to `end` of a request, read by one worker."""

    pending: _PendingRequest
    start: int
    end: int
    crashes: int = 0
    sent_at: float = 0.0
    rows: list[int] = field(default_factory=list)  # tiles that were read, as indices into the request
    reasons: tuple[str, ...] = ()

    @property
    def request(self) -> TileRequest:
        return self.pending.request.select(self.start, self.end)

    def fail(self, reason: str) -> None:
        """Mark all tiles as unreadable."""
        self.reasons = (reason,) * (self.end - self.start)


class _PendingRequest:
    """A request whose result was not fetched yet, split into parts for the workers."""

    def __init__(self, request: TileRequest, pixels: TilePixels) -> None:
        self.request, self.pixels = request, pixels
        count = len(request.positions)
        self.parts = [
            _PartialRequest(self, start, min(start + TILES_PER_PART, count))
            for start in range(0, count, TILES_PER_PART)
        ]
        self.unfinished = len(self.parts)

    def combine_parts(self) -> TileReadResult:
        """Combine the finished parts. Pixels of missing tiles are removed."""
        rows = np.array([row for part in self.parts for row in part.rows], np.int64)
        reasons = tuple(reason for part in self.parts for reason in part.reasons)
        if len(rows) == len(self.pixels):
            return TileReadResult(self.request, self.pixels, rows)
        end = 0
        for part in self.parts:
            self.pixels[end : end + len(part.rows)] = self.pixels[part.start : part.start + len(part.rows)]
            end += len(part.rows)
        return TileReadResult(self.request, self.pixels[:end], rows, reasons)


class TileStream:
    """Iterator over the results of requests. `waited_s` is the total time the caller waited.

    workers: number of processes that read ahead; with 0, each request is read when its result is requested.
    allocate: returns the arrays that pixels are read into, for example in pinned memory.
    pool: workers that were already started with `serve_requests`; they are used first.
    """

    def __init__(
        self,
        requests: Iterable[TileRequest],
        *,
        workers: int,
        prefetch_bytes: int = 2**30,
        allocate: Allocate = allocate_array,
        pool: WorkerPool | None = None,
    ) -> None:
        self.waited_s = 0.0
        self._requests, self._allocate = iter(requests), allocate
        self._pool = SlidePool(_MAX_OPEN_SLIDES, _CACHE_BYTES)
        started = pool.take_workers(workers) if pool is not None else []
        started += [start_worker(serve_requests) for _ in range(workers - len(started))]
        self._reader = _Prefetcher(self._requests, started, prefetch_bytes, allocate) if started else None

    def __iter__(self) -> Iterator[TileReadResult]:
        return self

    def __next__(self) -> TileReadResult:
        start = time.monotonic()
        try:
            if self._reader is not None:
                return self._reader.next_result()
            return read_request(self._pool, next(self._requests), self._allocate)
        finally:
            self.waited_s += time.monotonic() - start

    def close(self) -> None:
        """Stop the workers and discard what they are reading."""
        self._pool.close()
        if self._reader is not None:
            self._reader.close()

    def __enter__(self) -> TileStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Prefetcher:
    """A thread that sends parts of requests to workers and collects their results."""

    def __init__(
        self, requests: Iterator[TileRequest], workers: list[Worker], prefetch_bytes: int, allocate: Allocate
    ) -> None:
        self._requests, self._prefetch_bytes, self._allocate = requests, prefetch_bytes, allocate
        self._pending: deque[_PendingRequest] = deque()  # in order; finished or being read
        self._waiting: deque[_PartialRequest] = deque()
        self._exhausted = self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._wakeup_receiver, self._wakeup_sender = Pipe(duplex=False)  # wakes the thread
        self._idle = workers
        self._busy: dict[Connection, tuple[Worker, _PartialRequest]] = {}
        self._thread = threading.Thread(target=self._run, name="tile reader", daemon=True)
        self._thread.start()

    def next_result(self) -> TileReadResult:
        """Wait for the next request and return its result."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._error is not None
                    or (self._pending and self._pending[0].unfinished == 0)
                    or (self._exhausted and not self._pending)
                )
            )
            if self._error is not None:
                raise self._error
            if not self._pending:
                raise StopIteration
            pending = self._pending.popleft()
        self._wake_up()
        return pending.combine_parts()

    def close(self) -> None:
        """Stop the thread and the workers."""
        self._closed = True
        self._wake_up()
        self._thread.join()
        self._wakeup_receiver.close()
        self._wakeup_sender.close()

    def _wake_up(self) -> None:
        self._wakeup_sender.send_bytes(b"!")

    def _run(self) -> None:
        try:
            while not self._closed:
                self._queue_requests()
                self._send_parts()
                self._receive_parts()
        except BaseException as error:  # raised in the thread that iterates
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            for worker in [*self._idle, *(worker for worker, _ in self._busy.values())]:
                worker.stop()

    def _queue_requests(self) -> None:
        """Queue requests until their pixels reach `prefetch_bytes`; at least one request is queued."""
        while not self._exhausted:
            with self._changed:
                held = sum(each.request.nbytes for each in self._pending)
                if self._pending and held >= self._prefetch_bytes:
                    return
            request = next(self._requests, None)
            pending = _PendingRequest(request, self._allocate(request.shape)) if request is not None else None
            with self._changed:
                if pending is None:
                    self._exhausted = True
                else:
                    self._pending.append(pending)
                    self._waiting.extend(pending.parts)
                self._changed.notify_all()

    def _send_parts(self) -> None:
        while self._waiting and self._idle:
            worker, part = self._idle.pop(), self._waiting.popleft()
            self._busy[worker.connection] = worker, part
            part.sent_at = time.monotonic()
            try:
                worker.connection.send(part.request)
            except BrokenPipeError:
                self._retire_worker(worker, part, "")

    def _receive_parts(self) -> None:
        for connection in wait([self._wakeup_receiver, *self._busy], timeout=_TIMEOUT_S / 10):
            assert isinstance(connection, Connection)
            if connection is self._wakeup_receiver:
                self._wakeup_receiver.recv_bytes()
                continue
            worker, part = self._busy[connection]
            try:
                rows, part.reasons = connection.recv()
                if rows:
                    end = part.start + len(rows)
                    connection.recv_bytes_into(part.pending.pixels[part.start : end].data.cast("B"))
            except Exception:  # closed connection or incomplete result
                self._retire_worker(worker, part, "")
                continue
            part.rows = [part.start + row for row in rows]
            del self._busy[connection]
            self._idle.append(worker)
            self._finish_part(part)
        deadline = time.monotonic() - _TIMEOUT_S
        for worker, part in [*self._busy.values()]:
            if part.sent_at < deadline:
                self._retire_worker(worker, part, f"reading timed out after {_TIMEOUT_S / 60:.0f} minutes")

    def _retire_worker(self, worker: Worker, part: _PartialRequest, reason: str) -> None:
        """Replace a worker that crashed (empty `reason`) or timed out. A part is retried after its first crash."""
        del self._busy[worker.connection]
        exit_code = worker.stop()
        self._idle.append(start_worker(serve_requests))
        part.crashes += 1
        if part.crashes < _MAX_ATTEMPTS and not reason:
            self._waiting.appendleft(part)
            return
        # the rest of the request would probably crash the next worker too
        failed = [part, *(each for each in self._waiting if each.pending is part.pending)]
        self._waiting = deque(each for each in self._waiting if each.pending is not part.pending)
        for each in failed:
            each.fail(reason or describe_exit(exit_code))
            self._finish_part(each)

    def _finish_part(self, part: _PartialRequest) -> None:
        with self._changed:
            part.pending.unfinished -= 1
            self._changed.notify_all()


def serve_requests(connection: Connection) -> None:
    """Read requests that arrive on a connection and send back their results. Runs in a worker."""
    import cv2

    cv2.setNumThreads(1)  # several workers run in parallel
    pool = SlidePool(_MAX_OPEN_SLIDES, _CACHE_BYTES)
    while True:
        result = read_request(pool, connection.recv())
        connection.send((result.rows.tolist(), result.reasons))
        if len(result.rows):
            connection.send_bytes(result.pixels.data.cast("B"))

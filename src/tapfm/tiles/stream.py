"""Tiles read ahead: one queue over all slides, filled by a few processes, within a bound of memory.

The queue does not end with a slide: while the device works on one, the next ones are read. Requests come out in the
order they were put in, whatever the number of workers, and with 0 workers they are read when they are asked for. A
process that dies over a damaged slide costs the tiles it was reading, after a second try.
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

TILES_PER_PART = (
    32  # tiles a worker reads at a time: opening the slide is a small part of it, and a lost part a small loss
)
_MAX_ATTEMPTS = 2  # for a part whose process died
_TIMEOUT_S = 300.0  # for a part that does not come: a network drive that hangs must not hold up the run for ever
_MAX_OPEN_SLIDES, _CACHE_BYTES = 3, 16 * 2**20  # of each worker


@dataclass
class _PartialRequest:
    """Some tiles of a request, in one worker's hands."""

    pending: _PendingRequest
    start: int
    end: int
    crashes: int = 0
    sent_at: float = 0.0
    rows: list[int] = field(default_factory=list)  # those that were read, of the request
    reasons: tuple[str, ...] = ()

    @property
    def request(self) -> TileRequest:
        """The part as a request of its own."""
        return self.pending.request.select(self.start, self.end)

    def fail(self, reason: str) -> None:
        """Give all its tiles up."""
        self.reasons = (reason,) * (self.end - self.start)


class _PendingRequest:
    """A request that is being read."""

    def __init__(self, request: TileRequest, pixels: TilePixels) -> None:
        self.request, self.pixels = request, pixels
        count = len(request.positions)
        self.parts = [
            _PartialRequest(self, start, min(start + TILES_PER_PART, count))
            for start in range(0, count, TILES_PER_PART)
        ]
        self.missing = len(self.parts)

    def result(self) -> TileReadResult:
        """Put the parts together; where tiles are missing the others move up."""
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
    """Reads requests ahead of who iterates over it; `waited_s` is how long that one had to wait.

    `allocate` gives the memory that pixels are read into, for example such as a GPU can copy from by itself. Those of
    a `pool` are the first of its workers.
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
        started = pool.take(workers) if pool is not None else []
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
        """End the workers; what they were reading is dropped."""
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
    """A thread that hands parts to workers and puts their answers together."""

    def __init__(
        self, requests: Iterator[TileRequest], workers: list[Worker], prefetch_bytes: int, allocate: Allocate
    ) -> None:
        self._requests, self._prefetch_bytes, self._allocate = requests, prefetch_bytes, allocate
        self._pending: deque[_PendingRequest] = deque()  # in order; some ready, some being read
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
        """Wait for the next request to be complete."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._error is not None
                    or (self._pending and self._pending[0].missing == 0)
                    or (self._exhausted and not self._pending)
                )
            )
            if self._error is not None:
                raise self._error
            if not self._pending:
                raise StopIteration
            pending = self._pending.popleft()
        self._wake_up()
        return pending.result()

    def close(self) -> None:
        """End thread and workers."""
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
        except BaseException as error:  # the one who takes is told
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            for worker in [*self._idle, *(worker for worker, _ in self._busy.values())]:
                worker.stop()

    def _queue_requests(self) -> None:
        """Take requests while there is room for their pixels; one is taken in any case."""
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
            except Exception:  # the end of the connection, or half an answer
                self._retire_worker(worker, part, "")
                continue
            part.rows = [part.start + row for row in rows]
            del self._busy[connection]
            self._idle.append(worker)
            self._finish_part(part)
        late = time.monotonic() - _TIMEOUT_S
        for worker, part in [*self._busy.values()]:
            if part.sent_at < late:
                self._retire_worker(worker, part, f"nothing came in {_TIMEOUT_S / 60:.0f} minutes")

    def _retire_worker(self, worker: Worker, part: _PartialRequest, reason: str) -> None:
        del self._busy[worker.connection]
        exit_code = worker.stop()
        self._idle.append(start_worker(serve_requests))
        part.crashes += 1
        if part.crashes < _MAX_ATTEMPTS and not reason:
            self._waiting.appendleft(part)
            return
        # the rest of the slide would do the same to the next worker
        given_up = [part, *(each for each in self._waiting if each.pending is part.pending)]
        self._waiting = deque(each for each in self._waiting if each.pending is not part.pending)
        for each in given_up:
            each.fail(reason or describe_exit(exit_code))
            self._finish_part(each)

    def _finish_part(self, part: _PartialRequest) -> None:
        with self._changed:
            part.pending.missing -= 1
            self._changed.notify_all()


def serve_requests(connection: Connection) -> None:
    """Read what is asked for; runs in a worker."""
    import cv2

    cv2.setNumThreads(1)  # workers run side by side
    pool = SlidePool(_MAX_OPEN_SLIDES, _CACHE_BYTES)
    while True:
        read = read_request(pool, connection.recv())
        connection.send((read.rows.tolist(), read.reasons))
        if len(read.rows):
            connection.send_bytes(read.pixels.data.cast("B"))

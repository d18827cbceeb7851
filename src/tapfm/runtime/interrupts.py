"""Graceful stop on Ctrl-C and SIGTERM: finished work is saved first."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# A second signal within this time is ignored: terminals and schedulers may signal a process and also its process group.
_DUPLICATE_SIGNAL_WINDOW_S = 1.0


class StopSignalHandler:
    """Context manager that remembers the first stop signal (SIGINT or SIGTERM) and exits the process at the second one.

    Code in the context calls `signal_number` regularly, and stops when it is not None.
    """

    def __init__(self, print_message: Callable[[str], object]) -> None:
        self._print = print_message
        self._received_signal: int | None = None
        self._received_at = 0.0
        self._previous_handlers: dict[int, Any] = {}

    def signal_number(self) -> int | None:
        """Return the number of the first stop signal, or None if there was none."""
        return self._received_signal

    def __enter__(self) -> StopSignalHandler:
        if threading.current_thread() is threading.main_thread():  # only the main thread can handle signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - signature of signal handlers
        now = time.monotonic()
        if self._received_signal is None:
            self._received_signal, self._received_at = number, now
            self._print("The command will save finished work and stop. Press Ctrl-C again to stop now.")
        elif now - self._received_at > _DUPLICATE_SIGNAL_WINDOW_S:
            raise SystemExit(128 + self._received_signal)

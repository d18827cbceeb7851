"""Ctrl-C and SIGTERM as a request to stop, so that the current step is finished and saved first."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_ECHO_S = 1.0  # terminals and schedulers may signal process and group, that is twice


class StopRequests:
    """Context in which the first signal is only kept for `signal_number`, and a second one stops immediately."""

    def __init__(self, print_message: Callable[[str], object]) -> None:
        self._print = print_message
        self._number: int | None = None
        self._received_at = 0.0
        self._before: dict[int, Any] = {}

    def signal_number(self) -> int | None:
        """Return the number of the signal that was received, if any."""
        return self._number

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # signals reach no other
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as signal handlers are called
        now = time.monotonic()
        if self._number is None:
            self._number, self._received_at = number, now
            self._print("Stopping after this step, to save. Press Ctrl-C again to stop immediately.")
        elif now - self._received_at > _ECHO_S:
            raise SystemExit(128 + self._number)

"""Ctrl-C and SIGTERM as a request: the work in hand is finished and saved first."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

ECHO_S = 1.0  # terminals and schedulers may signal process and group, that is twice


class StopRequests:
    """Within it, the first signal is noted; a second one stops at once."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._number: int | None = None
        self._heard_at = 0.0
        self._before: dict[int, Any] = {}

    def asked(self) -> int | None:
        """Give the number of the signal that came, if any."""
        return self._number

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # only that one hears signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as signal handlers are called
        now = time.monotonic()
        if self._number is None:
            self._number, self._heard_at = number, now
            self._say("Stopping after this step, to save; once more stops at once.")
        elif now - self._heard_at > ECHO_S:
            raise SystemExit(128 + self._number)

"""How far long work is."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SAY_EVERY_S = 15.0  # where no terminal shows a bar


def progress_bar(console: Console) -> Progress:
    """Show slides done, speeds and the time that is left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class Counter:
    """A bar that counts slides; lines where no terminal shows it."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console, self._what, self._total, self._done = console, what, total, 0
        self._progress = progress_bar(console)
        self._bar = self._progress.add_task(what, total=total, speed="")
        self._said_at = time.monotonic()

    def one_more(self, tiles: int) -> None:
        """Count a slide, of which so many tiles were read."""
        self._done += 1
        self._progress.update(self._bar, advance=1, speed=f"{tiles:,} tiles in the last slide")
        if not self._console.is_terminal and time.monotonic() - self._said_at > SAY_EVERY_S:
            self._console.print(f"{self._what}: {self._done:,} of {self._total:,} slides")
            self._said_at = time.monotonic()

    def __enter__(self) -> Counter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

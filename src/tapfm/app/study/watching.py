"""How far a study is: one line that lives, or a line now and then where no terminal shows it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tapfm.app.progress import SAY_EVERY_S

COUNT_EVERY_S = 1.0


class StudyWatcher:
    """Shows runs done, the steps in hand with their epochs, and the time so far."""

    def __init__(self, console: Console, what: str, total: int, done: int) -> None:
        self._console, self._what, self._total, self._done = console, what, total, done
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[said]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task(what, total=total, completed=done, said="")
        self._progress.start()
        self._at_work: dict[str, tuple[Path | None, int]] = {}  # by step: history and epochs of a training run
        self._said_at = self._counted_at = time.monotonic()

    def close(self) -> None:
        """Take the bar off."""
        self._progress.stop()

    @contextmanager
    def watching(self, step: str, history: Path | None, epochs: int) -> Iterator[None]:
        """Show a step while it is at work; a training run has a history and epochs."""
        self._at_work = {**self._at_work, step: (history, epochs)}  # anew: another thread may be reading it
        self._progress.update(self._bar, said=self._steps())
        if not self._console.is_terminal:
            self.say(f"{self._done} of {self._total} {self._what} done; {step}")
        try:
            yield
        finally:
            self._at_work = {name: each for name, each in self._at_work.items() if name != step}

    def look(self) -> None:
        """Count the epochs that are done."""
        now = time.monotonic()
        if now - self._counted_at < COUNT_EVERY_S:
            return
        self._counted_at = now
        said = self._steps()
        self._progress.update(self._bar, said=said)
        if said and not self._console.is_terminal and now - self._said_at > SAY_EVERY_S:
            self.say(said)

    def _steps(self) -> str:
        return "; ".join(f"{step}{epoch_of(*each)}" for step, each in self._at_work.items())

    def finished(self) -> None:
        """Count a run of which nothing is left to do."""
        self._done += 1
        self._progress.update(self._bar, completed=self._done)

    def say(self, text: str) -> None:
        """Say something that stays."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._said_at = time.monotonic()


def epoch_of(history: Path | None, epochs: int) -> str:
    """Say how far a training run is; nothing of other steps."""
    if history is None or not epochs:
        return ""
    try:
        done = history.read_bytes().count(b"\n")
    except OSError:  # not there yet
        done = 0
    return f", epoch {min(done + 1, epochs)}/{epochs}"

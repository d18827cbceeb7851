"""How far a study is: one line that lives, or a line now and then where no terminal shows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tapfm.runtime.progress import SAY_EVERY_S

COUNT_EVERY_S = 1.0


@dataclass(frozen=True)
class InHand:
    """A step that is at work."""

    bar: TaskID
    history: Path | None
    epochs: int

    def epochs_done(self) -> int:
        """Count the epochs of a training run; 0 of other steps."""
        try:
            return self.history.read_bytes().count(b"\n") if self.history is not None and self.epochs else 0
        except OSError:  # not there yet
            return 0


class StudyWatcher:
    """Shows runs done, below them each step in hand with its epochs, and the time so far."""

    def __init__(self, console: Console, what: str, total: int, done: int) -> None:
        self._console, self._what, self._total, self._done = console, what, total, done
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task(what, total=total, completed=done)
        self._progress.start()
        self.at_work: dict[str, InHand] = {}
        self._gate = threading.Lock()  # steps come and go in threads of their own
        self._said_at = self._counted_at = time.monotonic()

    def close(self) -> None:
        """Take the bars off."""
        self._progress.stop()

    @contextmanager
    def watching(self, step: str, history: Path | None, epochs: int) -> Iterator[None]:
        """Show a step while it is at work; a training run has a history and epochs."""
        bar = self._progress.add_task(f"  {step}", total=epochs or None)
        with self._gate:
            self.at_work[step] = InHand(bar, history, epochs)
        if not self._console.is_terminal:
            self.say(f"{self._done} of {self._total} {self._what} done; {step}")
        try:
            yield
        finally:
            with self._gate:
                del self.at_work[step]
                self._progress.remove_task(bar)

    def look(self) -> None:
        """Count the epochs that are done."""
        now = time.monotonic()
        if now - self._counted_at < COUNT_EVERY_S:
            return
        self._counted_at = now
        said = []
        with self._gate:
            for step, each in self.at_work.items():
                done = each.epochs_done()
                self._progress.update(each.bar, completed=done)
                said.append(f"{step}, epoch {min(done + 1, each.epochs)}/{each.epochs}" if each.epochs else step)
        if said and not self._console.is_terminal and now - self._said_at > SAY_EVERY_S:
            self.say("; ".join(said))

    def finished(self) -> None:
        """Count a run of which nothing is left to do."""
        self._done += 1
        self._progress.update(self._bar, completed=self._done)

    def say(self, text: str) -> None:
        """Say something that stays."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._said_at = time.monotonic()

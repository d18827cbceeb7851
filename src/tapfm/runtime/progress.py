"""How far long work is."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

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


def say_failed(console: Console, slide_id: str, reason: str) -> None:
    """Tell of a slide that failed, above a bar."""
    console.print(Text.assemble(("failed ", "red"), f"{slide_id}: {reason}"), soft_wrap=True)


class Counter:
    """A bar that counts slides until it is closed; lines where no terminal shows it."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console, self._what, self._total, self._done = console, what, total, 0
        self._progress = progress_bar(console)
        self._bar = self._progress.add_task(what, total=total, speed="")
        self._progress.start()
        self._said_at = time.monotonic()

    def one_more(self, tiles: int | None = None) -> None:
        """Count a slide, of which so many tiles were read."""
        self._done += 1
        speed = "" if tiles is None else f"{tiles:,} tiles in the last slide"
        self._progress.update(self._bar, advance=1, speed=speed)
        if not self._console.is_terminal and time.monotonic() - self._said_at > SAY_EVERY_S:
            self._console.print(f"{self._what}: {self._done:,} of {self._total:,} slides")
            self._said_at = time.monotonic()

    def failed(self, slide_id: str, reason: str) -> None:
        """Tell of a slide that failed."""
        say_failed(self._console, slide_id, reason)

    def close(self) -> None:
        """Take the bar off."""
        self._progress.stop()


class TileCounter:
    """A bar that counts the tiles of many slides, as a slide may take long; lines where no terminal shows it."""

    def __init__(self, console: Console, slides: int, tiles: int) -> None:
        self._console, self._slides, self._tiles = console, slides, tiles
        self._slides_done = self._tiles_seen = 0
        self._tiles_past = self._tiles_before = 0  # encoded or lost: all, and those of finished slides
        self._progress = progress_bar(console)
        self._bar = self._progress.add_task("predicting", total=tiles, speed="")
        self._progress.start()
        self._began_at = self._said_at = time.monotonic()

    def more_tiles(self, tiles: int) -> None:
        """Count tiles that were encoded."""
        self._tiles_seen += tiles
        self._tiles_past += tiles
        self._show()

    def one_more_slide(self, tiles: int) -> None:
        """Count a slide, with all of its tiles: those that could not be read are over too."""
        self._slides_done += 1
        self._tiles_past = self._tiles_before = self._tiles_before + tiles
        self._show()

    def failed(self, slide_id: str, reason: str) -> None:
        """Tell of a slide that failed."""
        say_failed(self._console, slide_id, reason)

    def _show(self) -> None:
        now = time.monotonic()
        speed = f"{self._tiles_seen / max(now - self._began_at, 1e-9):,.0f} tiles/s"
        slides = f"{self._slides_done:,} of {self._slides:,} slides"
        self._progress.update(self._bar, completed=self._tiles_past, speed=f"tiles, {slides}, {speed}")
        if not self._console.is_terminal and now - self._said_at > SAY_EVERY_S:
            self._console.print(f"{slides}, {self._tiles_past:,} of {self._tiles:,} tiles, {speed}")
            self._said_at = now

    def close(self) -> None:
        """Take the bar off."""
        self._progress.stop()

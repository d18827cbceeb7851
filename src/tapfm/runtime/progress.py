"""Progress over slides: a bar in a terminal, otherwise a line at most every 15 seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

PRINT_INTERVAL_S = 15.0  # between progress lines if the output is not a terminal


def make_progress_bars(console: Console, *, transient: bool = False) -> Progress:
    """Return progress bars with description, count, note and times. Each task needs a field `note`."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=transient,
        disable=not console.is_terminal,
    )


def print_failure(console: Console, name: str, reason: str) -> None:
    """Print, above the progress bars, that a slide or a step of a study failed, and why."""
    console.print(Text.assemble(("failed ", "red"), f"{name}: {reason}"), soft_wrap=True)


class SlideProgress:
    """Context manager that shows progress over slides, or over their tiles if the number of tiles is known.

    description: what is done with the slides, such as "tiling".
    slides, tiles: total numbers. The bar counts tiles, or slides if `tiles` is None.
    note: returns additional text to show, such as "waiting for data 12%".
    transient: remove the bar at the end.
    """

    def __init__(
        self,
        console: Console,
        description: str,
        *,
        slides: int,
        tiles: int | None = None,
        note: Callable[[], str] = lambda: "",
        transient: bool = False,
    ) -> None:
        self._console, self._description, self._note = console, description, note
        self._slides, self._tiles = slides, tiles
        self._slides_done = self._failed = self._tiles_done = 0
        self._tiles_handled = 0  # processed or unreadable
        self._tiles_of_finished = 0  # the part of `_tiles_handled` that belongs to finished slides
        self._bars = make_progress_bars(console, transient=transient)
        self._bar = self._bars.add_task(description, total=slides if tiles is None else tiles, note="")
        self._started_at = self._printed_at = time.monotonic()

    def __enter__(self) -> SlideProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def add_tiles(self, tiles: int) -> None:
        """Count processed tiles of a slide that is not finished yet."""
        self._tiles_done += tiles
        self._tiles_handled += tiles
        self._update()

    def finish_slide(self, slide_id: str, *, tiles: int = 0, failure: str = "") -> None:
        """Count a finished or failed slide, and print `failure` if there is one.

        tiles: number of tiles of the slide, including unreadable tiles if the bar counts tiles.
        failure: why the slide failed; empty if it did not.
        """
        self._slides_done += 1
        if self._tiles is None:
            self._tiles_done += tiles
        self._tiles_handled = self._tiles_of_finished = self._tiles_of_finished + tiles
        if failure:
            self._failed += 1
            print_failure(self._bars.console, slide_id, failure)
        self._update()

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self._bars.console.print(text, markup=False, soft_wrap=True)

    def _update(self) -> None:
        now = time.monotonic()
        elapsed = max(now - self._started_at, 1e-9)
        parts = [_describe_speed(self._slides_done / elapsed)] if self._slides_done and self._tiles is None else []
        if self._tiles_done:
            parts += [f"{self._tiles_done:,} tiles"] if self._tiles is None else []
            parts.append(f"{self._tiles_done / elapsed:,.0f} tiles/s")
        parts += [note] if (note := self._note()) else []
        parts += [f"{self._failed:,} failed"] if self._failed else []
        slides = f"{self._slides_done:,} of {self._slides:,} slides"
        if self._tiles is None:
            self._bars.update(self._bar, completed=self._slides_done, note=", ".join(parts))
        else:
            self._bars.update(self._bar, completed=self._tiles_handled, note=", ".join([f"tiles, {slides}", *parts]))
        if not self._console.is_terminal and now - self._printed_at > PRINT_INTERVAL_S:
            counts = [slides] if self._tiles is None else [slides, f"{self._tiles_handled:,} of {self._tiles:,} tiles"]
            self.print(f"{self._description}: {', '.join([*counts, *parts])}")
            self._printed_at = now


def _describe_speed(slides_per_second: float) -> str:
    return f"{slides_per_second:.1f} slides/s" if slides_per_second >= 1 else f"{1 / slides_per_second:.1f} s per slide"

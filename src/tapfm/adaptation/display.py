"""What is seen of a run: bars at a terminal, plain lines elsewhere, and TensorBoard."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import TaskID

from tapfm.runs import progress as progress_of_run
from tapfm.runtime.progress import PRINT_INTERVAL_S, make_progress_bars


class TrainingDisplay:
    """Shows the progress of a training run."""

    def __init__(self, console: Console, epochs: int, slides: int, validation_slides: int, folder: Path) -> None:
        self._console, self._epochs = console, epochs
        self._per_epoch = slides + validation_slides
        self._progress = make_progress_bars(console)
        self._run = self._progress.add_task("run", total=epochs * self._per_epoch, note="", visible=False)
        self._pass: TaskID = self._progress.add_task("", total=None, note="", visible=False)
        self._progress.start()
        self._said_at = time.monotonic()
        self._phase, self._epoch, self._done, self._total = "train", 0, 0, 0
        self._board = _TensorBoardWriter(folder / "tensorboard", console)

    def close(self) -> None:
        """Take the bars off, and finish the event file."""
        self._progress.stop()
        self._board.close()

    def on_pass_start(self, phase: Literal["train", "validate"], epoch: int, slides: int, done: int) -> None:
        """Show a new pass."""
        self._phase, self._epoch, self._done, self._total = phase, epoch, done, slides
        before = epoch * self._per_epoch + (self._per_epoch - slides if phase == "validate" else done)
        self._progress.update(self._run, completed=before, visible=True)
        self._progress.reset(
            self._pass,
            total=slides,
            completed=done,
            description=f"epoch {epoch + 1}/{self._epochs} {'training' if phase == 'train' else 'validation'}",
            visible=True,
        )

    def on_slide_end(self, progress: progress_of_run.RunProgress) -> None:
        """Show one more slide."""
        self._done += 1
        sums = progress.sums
        loss = f"L_agg {sums.sums['loss_agg'] / sums.slides:.3f}, " if sums.slides else ""
        said = f"{loss}{sums.tiles_per_second:,.0f} tiles/s, waiting {sums.data_wait_fraction:.0%}"
        if progress.failed:
            said += f", {len(progress.failed)} failed"
        self._progress.update(self._pass, advance=1, note=said)
        self._progress.update(self._run, advance=1, note=_best_so_far(progress))
        if not self._console.is_terminal and time.monotonic() - self._said_at > PRINT_INTERVAL_S:
            verb = "training" if self._phase == "train" else "validation"
            self._say(f"epoch {self._epoch + 1}/{self._epochs} {verb}: {self._done} of {self._total} slides, {said}")

    def on_epoch_end(self, row: Mapping[str, Any], *, best: bool) -> None:
        """Tell what an epoch came to; a line that stays."""
        auc = f"AUC {_format_auc(row['train_macro_auc'])} training, {_format_auc(row['val_macro_auc'])} validation"
        self._say(
            f"epoch {row['epoch']}/{self._epochs}: L_agg {row['loss_agg']:.4f}, {auc}{' (best)' if best else ''}, "
            f"{row['tiles_per_second']:,.0f} tiles/s, waiting {row['data_wait_fraction']:.0%}, {row['seconds']:,.0f} s"
        )
        self._board.add(row)

    def on_slide_failed(self, slide_id: str, reason: str) -> None:
        """Tell of a slide that failed."""
        self._say(f"failed {slide_id}: {reason}")

    def on_warning(self, message: str) -> None:
        """Show a warning."""
        self._say(message)

    def _say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._said_at = time.monotonic()


class _TensorBoardWriter:
    """Event files for TensorBoard; without the package there are none, and the run goes on."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console
        self._writer: Any = None
        self._missing = False

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the numbers of an epoch."""
        if self._missing:
            return
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                # events of epochs that a resumed run repeats are dropped
                self._writer = SummaryWriter(str(self._folder), purge_step=row["epoch"])
            for name, value in _scalars_of(row):
                self._writer.add_scalar(name, value, row["epoch"])
            self._writer.flush()
        except ImportError:
            self._missing = True
            self._console.print("TensorBoard is not installed: no event files. pip install tensorboard")
        except OSError as error:  # events are a copy of history.jsonl: not worth a run
            self._console.print(f"TensorBoard's events cannot be written ({error}).", markup=False)
            self._writer, self._missing = None, True

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            with contextlib.suppress(OSError):  # a full disk: what counts is saved elsewhere
                self._writer.close()


def _scalars_of(row: Mapping[str, Any]) -> Sequence[tuple[str, float]]:
    """Name the numbers of an epoch as TensorBoard groups them."""
    numbers: list[tuple[str, float]] = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            numbers += [(f"{name}/{target}", each) for target, each in value.items() if isinstance(each, int | float)]
        elif isinstance(value, int | float) and name != "epoch":
            numbers.append((f"{name.partition('_')[0]}/{name}", value))
    return numbers


def _best_so_far(progress: progress_of_run.RunProgress) -> str:
    """Say which epoch leads."""
    if progress.best_epoch is None:
        return ""
    row = progress.history[progress.best_epoch]
    return f"best: epoch {row['epoch']}, AUC {_format_auc(row['val_macro_auc'])}"


def _format_auc(value: float | None) -> str:
    """Write an AUC, or that there is none."""
    return "-" if value is None else f"{value:.4f}"

"""Display the progress of training: bars in a terminal, plain lines elsewhere, and TensorBoard event files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import TaskID

from tapfm.runs.run_progress import RunProgress
from tapfm.runtime.progress import PRINT_INTERVAL_S, make_progress_bars

_PHASE_NAMES = {"train": "training", "validate": "validation"}


class TrainingDisplay:
    """Training listener that shows the progress of a run and writes TensorBoard event files.

    label: name of the run if it is one of several, such as "fold 2 of 5".
    """

    def __init__(
        self, console: Console, epochs: int, slides: int, validation_slides: int, folder: Path, *, label: str = ""
    ) -> None:
        self._console, self._epochs = console, epochs
        self._prefix = f"{label}, " if label else ""
        self._per_epoch = slides + validation_slides
        self._progress = make_progress_bars(console)
        self._run = self._progress.add_task(label or "run", total=epochs * self._per_epoch, note="", visible=False)
        self._pass: TaskID = self._progress.add_task("", total=None, note="", visible=False)
        self._progress.start()
        self._printed_at = time.monotonic()
        self._phase: Literal["train", "validate"] = "train"
        self._epoch, self._done, self._total = 0, 0, 0
        self._tensorboard = _TensorBoardWriter(folder / "tensorboard", console)

    def close(self) -> None:
        """Stop the progress bars and close the event file."""
        self._progress.stop()
        self._tensorboard.close()

    def on_pass_start(self, phase: Literal["train", "validate"], epoch: int, slides: int, done: int) -> None:
        self._phase, self._epoch, self._done, self._total = phase, epoch, done, slides
        completed = epoch * self._per_epoch + (self._per_epoch - slides if phase == "validate" else done)
        self._progress.update(self._run, completed=completed, visible=True)
        self._progress.reset(
            self._pass,
            total=slides,
            completed=done,
            description=f"epoch {epoch + 1}/{self._epochs} {_PHASE_NAMES[phase]}",
            visible=True,
        )

    def on_slide_end(self, progress: RunProgress) -> None:
        self._done += 1
        sums = progress.sums
        loss = f"L_agg {sums.sums['loss_agg'] / sums.slides:.3f}, " if sums.slides else ""
        # validation tiles are only counted at the end of a pass
        speed = f"{sums.tiles_per_second:,.0f} tiles/s, " if self._phase == "train" else ""
        note = f"{loss}{speed}waiting for data {sums.data_wait_fraction:.0%}"
        if progress.failed:
            note += f", {len(progress.failed)} failed"
        self._progress.update(self._pass, advance=1, note=note)
        self._progress.update(self._run, advance=1, note=_describe_best_epoch(progress))
        if not self._console.is_terminal and time.monotonic() - self._printed_at > PRINT_INTERVAL_S:
            phase = _PHASE_NAMES[self._phase]
            epoch = f"{self._prefix}epoch {self._epoch + 1}/{self._epochs}"
            self._print(f"{epoch} {phase}: {self._done} of {self._total} slides, {note}")

    def on_epoch_end(self, row: Mapping[str, Any], *, best: bool) -> None:
        """Print the metrics of an epoch, and write them to TensorBoard."""
        auc = f"AUC {_format_auc(row['train_macro_auc'])} training, {_format_auc(row['val_macro_auc'])} validation"
        epoch = f"{self._prefix}epoch {row['epoch']}/{self._epochs}"
        self._print(
            f"{epoch}: L_agg {row['loss_agg']:.4f}, {auc}{' (best)' if best else ''}, "
            f"{row['tiles_per_second']:,.0f} tiles/s, waiting for data {row['data_wait_fraction']:.0%}, "
            f"{row['seconds']:,.0f} s"
        )
        self._tensorboard.add(row)

    def on_slide_failed(self, slide_id: str, reason: str) -> None:
        self._print(f"failed {slide_id}: {reason}")

    def on_warning(self, message: str) -> None:
        self._print(message)

    def _print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._printed_at = time.monotonic()


class _TensorBoardWriter:
    """Writer of TensorBoard event files. Writes nothing if TensorBoard is not installed."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console
        self._writer: Any = None
        self._disabled = False

    def add(self, row: Mapping[str, Any]) -> None:
        """Write all scalars of an epoch."""
        if self._disabled:
            return
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                # purge_step: events of epochs that a resumed run repeats are dropped
                self._writer = SummaryWriter(str(self._folder), purge_step=row["epoch"])
            for name, value in _flatten_scalars(row):
                self._writer.add_scalar(name, value, row["epoch"])
            self._writer.flush()
        except ImportError:
            self._disabled = True
            self._console.print(
                "TensorBoard is not installed, so no event files are written. To write them: pip install tensorboard"
            )
        except OSError as error:  # not worth stopping a run: history.jsonl has the same values
            self._console.print(
                f"Cannot write TensorBoard event files in {self._folder} ({error}). Training continues without them.",
                markup=False,
            )
            self._writer, self._disabled = None, True

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):  # for example a full disk; only TensorBoard events are lost
                self._writer.close()


def _flatten_scalars(row: Mapping[str, Any]) -> Sequence[tuple[str, float]]:
    """Return the numeric values of an epoch with names in the form GROUP/NAME, as TensorBoard groups them."""
    scalars: list[tuple[str, float]] = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            scalars += [(f"{name}/{target}", each) for target, each in value.items() if isinstance(each, int | float)]
        elif isinstance(value, int | float) and name != "epoch":
            scalars.append((f"{name.partition('_')[0]}/{name}", value))
    return scalars


def _describe_best_epoch(progress: RunProgress) -> str:
    if progress.best_epoch is None or progress.selected_by == "last":
        return ""
    row = progress.history[progress.best_epoch]
    return f"best: epoch {row['epoch']}, AUC {_format_auc(row['val_macro_auc'])}"


def _format_auc(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"

"""Progress over the steps of a study: bars in a terminal, otherwise lines of text.

A line is printed when a step starts, and every 15 seconds while steps are running.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.progress import TaskID

from tapfm.runtime.messages import format_count
from tapfm.runtime.progress import PRINT_INTERVAL_S, make_progress_bars, print_failure
from tapfm.runtime.steps import Step, StepResult

_UPDATE_INTERVAL_S = 1.0  # between two counts of finished epochs


class StepBars:
    """Context manager that shows a bar for the groups of steps, and one for the epochs of each running step.

    done_keys: keys of the steps that are already done.
    groups: the groups to count. A group is finished when all of its steps have ended.
    noun: name of a group, such as "run".
    """

    def __init__(
        self, console: Console, steps: Sequence[Step], done_keys: Collection[str], *, groups: Collection[str], noun: str
    ) -> None:
        self._console, self._noun = console, noun
        self._remaining_keys_by_group = {
            group: {step.key for step in steps if step.group == group} - set(done_keys) for group in groups
        }
        if finished := self._count_finished_groups():
            console.print(f"{finished} of {format_count(len(groups), noun)} already done.")
        self._bars = make_progress_bars(console)
        self._groups_bar = self._bars.add_task(f"{noun}s", total=len(groups), completed=finished, note="")
        self._running: dict[str, tuple[Step, TaskID]] = {}
        self._updated_at = self._printed_at = time.monotonic()

    def __enter__(self) -> StepBars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show_start(self, step: Step) -> None:
        """Add a bar for a step, or print a line if the output is not a terminal."""
        self._running[step.key] = step, self._bars.add_task(f"  {step.key}", total=step.epochs or None, note="")
        if not self._console.is_terminal:
            groups = f"{self._count_finished_groups()} of {len(self._remaining_keys_by_group)} {self._noun}s"
            self._print(f"{groups} done; starting {step.key}")

    def show_progress(self) -> None:
        """Update the number of finished epochs of each running step."""
        now = time.monotonic()
        if now - self._updated_at < _UPDATE_INTERVAL_S:
            return
        self._updated_at = now
        lines = []
        for step, bar in self._running.values():
            epochs = _count_finished_epochs(step)
            self._bars.update(bar, completed=epochs)
            lines.append(f"{step.key}, epoch {min(epochs + 1, step.epochs)}/{step.epochs}" if step.epochs else step.key)
        if lines and not self._console.is_terminal and now - self._printed_at > PRINT_INTERVAL_S:
            self._print("; ".join(lines))

    def show_result(self, step: Step, result: StepResult) -> None:
        """Remove the bar of a step, update the bar of the groups, and print the reason if the step failed."""
        if step.key in self._running:
            self._bars.remove_task(self._running.pop(step.key)[1])
        if result.state == "failed":
            print_failure(self._bars.console, step.key, result.reason)
        self._remaining_keys_by_group.get(step.group, set()).discard(step.key)
        self._bars.update(self._groups_bar, completed=self._count_finished_groups())

    def _count_finished_groups(self) -> int:
        return sum(not keys for keys in self._remaining_keys_by_group.values())

    def _print(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._printed_at = time.monotonic()


def _count_finished_epochs(step: Step) -> int:
    try:
        return step.history_file.read_bytes().count(b"\n") if step.history_file is not None else 0
    except OSError:  # not written yet
        return 0

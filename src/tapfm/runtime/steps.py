"""Run the steps of a study or of the demo. A failed step only blocks the steps that need it.

A step is a tapfm command or a Python function. It is not related to training steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from tapfm.errors import TapfmError
from tapfm.runtime.commands import POLL_INTERVAL_S, read_failure_reason

StepState = Literal["done", "failed", "not run"]
INTERRUPTED_EXIT_CODE = 130  # of a command that Ctrl-C stopped: 128 + SIGINT
_STOPPED_REASON = "stopped by a signal (Ctrl-C or SIGTERM)"


@dataclass(frozen=True)
class Step:
    """A tapfm command to run, or a Python function to call in this process.

    name: unique within the group. The key of a step is "group: name", or its name if it has no group.
    arguments: arguments of the command; empty if the step has a function.
    log: file for the command's output.
    group: what the step belongs to, such as a run, an ensemble or a cohort; may be empty.
    title: heading that a display may print instead of the key.
    expected_outputs: files and folders that the step writes. Without `check_done`, a step is done if all of them exist.
    check_done: returns whether the step is done.
    needs: keys of the steps that must be done first.
    function: the function to call; None if the step has a command.
    prepare: called right before the step runs.
    config_error: error message if the settings of the command are invalid, otherwise empty. A step with such a
        message fails without running its command.
    history_file, epochs: for training, the file with one line per finished epoch, and the total number of epochs.
    summary_line_prefixes: lines of the command's output that start with one of these summarise the result of the step.
        A display may show them.
    """

    name: str
    arguments: tuple[str, ...]
    log: Path
    group: str = ""
    title: str = ""
    expected_outputs: tuple[Path, ...] = ()
    check_done: Callable[[], bool] | None = None
    needs: tuple[str, ...] = ()
    function: Callable[[], object] | None = None
    prepare: Callable[[], object] | None = None
    config_error: str = ""
    history_file: Path | None = None
    epochs: int = 0
    summary_line_prefixes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The text "group: name", which is unique; only the name if the step has no group."""
        return f"{self.group}: {self.name}" if self.group else self.name

    def is_done(self) -> bool:
        return all(path.exists() for path in self.expected_outputs) if self.check_done is None else self.check_done()


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    reason: why the step failed or was not run.
    exit_code: exit code of the step's command.
    seconds: running time of the step.
    exception: exception that the step raised in this process, if any.
    """

    state: StepState
    reason: str = ""
    exit_code: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)
    exception: TapfmError | None = field(default=None, compare=False)


class StepDisplay(Protocol):
    """Displays steps as they run. Its methods are called from the main thread only."""

    def show_start(self, step: Step) -> None:
        """Show that a step is running."""

    def show_progress(self) -> None:
        """Show the progress of running steps; called several times per second while a child process runs."""

    def show_result(self, step: Step, result: StepResult) -> None:
        """Show the result of a step, including steps that could not run."""


class StepRunner:
    """Runs the steps that are not done yet, each after the steps it needs.

    run_command(step, poll_signal): runs the command of a step and returns the exit code. Meanwhile, `run_command` must
        call `poll_signal()` regularly. `poll_signal` returns the number of a signal to forward to the command, or None.
        It raises SystemExit if the command must stop immediately.
    save_results: called with the results of all steps by key, at the start and after each step.
    signal_number: returns the number of a received stop signal, or None. After a stop signal no step is started.
    jobs: number of steps to run at the same time. With 1, steps run in the calling thread, otherwise in other threads.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        run_command: Callable[[Step, Callable[[], int | None]], int],
        *,
        save_results: Callable[[Mapping[str, StepResult]], object],
        display: StepDisplay,
        signal_number: Callable[[], int | None] = lambda: None,
        jobs: int = 1,
    ) -> None:
        self._steps, self._run_command, self._jobs = steps, run_command, jobs
        self._save_results, self._display, self._signal_number = save_results, display, signal_number
        self._results: dict[str, StepResult] = {}
        self._stop_now = threading.Event()

    def run(self, done_keys: Collection[str]) -> dict[str, StepResult]:
        """Run the steps whose keys are not in `done_keys`.

        Return the results of all steps by key, including the steps in `done_keys`.
        """
        self._results = {step.key: StepResult("done" if step.key in done_keys else "not run") for step in self._steps}
        self._save_results(self._results)
        waiting = [step for step in self._steps if step.key not in done_keys]
        running: dict[Future[StepResult], Step] = {}
        with ThreadPoolExecutor(self._jobs) if self._jobs > 1 else _InlineExecutor() as executor:
            try:
                while running or (waiting and self._signal_number() is None):
                    unfinished = {step.key for step in (*waiting, *running.values())}
                    ready = [step for step in waiting if unfinished.isdisjoint(step.needs)]
                    for step in ready[: self._jobs - len(running)] if self._signal_number() is None else []:
                        waiting.remove(step)
                        if blocked_result := self._result_if_blocked(step):
                            self._finish(step, blocked_result)
                        else:
                            self._display.show_start(step)
                            running[executor.submit(self._run_step, step)] = step
                    finished, _ = wait(running, POLL_INTERVAL_S, FIRST_COMPLETED)
                    self._check_stop_signal()
                    for future in finished:
                        self._finish(running.pop(future), future.result())
            except BaseException:  # for example SystemExit at a second signal
                # On exit, the executor waits for its threads. The event makes the steps in these threads stop.
                self._stop_now.set()
                raise
        return self._results

    def _result_if_blocked(self, step: Step) -> StepResult | None:
        """Return the result of a step that cannot run, or None if the step can run."""
        if step.config_error:
            return StepResult("failed", step.config_error)
        done = {key for key, result in self._results.items() if result.state == "done"}
        return next(
            (StepResult("not run", f"needs {key}, which did not finish") for key in step.needs if key not in done), None
        )

    def _run_step(self, step: Step) -> StepResult:
        start = time.monotonic()
        try:
            result = self._execute(step)
        except TapfmError as error:
            result = StepResult("failed", error.message, error.exit_code, exception=error)
        except KeyboardInterrupt:
            result = StepResult("not run", _STOPPED_REASON, INTERRUPTED_EXIT_CODE)
        return replace(result, seconds=time.monotonic() - start)

    def _execute(self, step: Step) -> StepResult:
        if step.prepare is not None:
            step.prepare()
        log_bytes = step.log.stat().st_size if step.log.exists() else 0
        code = 0
        if step.function is not None:
            step.function()
        else:
            code = self._run_command(step, self._check_stop_signal)
        if code == 0 and step.is_done():
            return StepResult("done")
        if self._signal_number() is not None:
            return StepResult("not run", _STOPPED_REASON, code)
        if code == 0:
            return StepResult("failed", "the step reported no error, but its output files are missing or incomplete")
        return StepResult("failed", read_failure_reason(code, step.log, log_bytes), code)

    def _check_stop_signal(self) -> int | None:
        """Update the display, and return the number of a received stop signal or None.

        Raises SystemExit if the steps must stop immediately.
        """
        if self._stop_now.is_set():
            raise SystemExit
        if threading.current_thread() is threading.main_thread():
            self._display.show_progress()
        return self._signal_number()

    def _finish(self, step: Step, result: StepResult) -> None:
        self._results[step.key] = result
        self._save_results(self._results)
        if self._signal_number() is None:  # do not show a stopped step as finished
            self._display.show_result(step, result)


class _InlineExecutor(Executor):
    """Executor that calls functions immediately in the calling thread."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future

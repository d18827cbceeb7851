"""Run steps, such as commands: finished ones are kept, and a failure costs only the steps that need the failed one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from tapfm.errors import TapfmError
from tapfm.runtime.commands import POLL_EVERY_S, failure_reason

State = Literal["done", "failed", "not run"]
STOPPED_CODE = 130  # after Ctrl-C


@dataclass(frozen=True)
class Step:
    """A command to run, or a function to call.

    name: unique within the group.
    words: of the command, without "tapfm"; none if `function` is called instead.
    log: file for the command's output.
    group: the run or cohort that it belongs to, if any.
    files: what it makes, all of which exist once it is done; `is_done` tells more than that where it is given.
    needs: keys of steps that have to be done before.
    before: called right before the step runs.
    problem: why it cannot run.
    history, epochs: file with a line per finished epoch and their number, of a training run.
    shown_lines: how those lines of the output begin that a display may show.
    """

    name: str
    words: tuple[str, ...]
    log: Path
    group: str = ""
    title: str = ""
    files: tuple[Path, ...] = ()
    is_done: Callable[[], bool] | None = None
    needs: tuple[str, ...] = ()
    function: Callable[[], object] | None = None
    before: Callable[[], object] | None = None
    problem: str = ""
    history: Path | None = None
    epochs: int = 0
    shown_lines: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name that no other step has."""
        return f"{self.group}: {self.name}" if self.group else self.name

    def done(self) -> bool:
        """Return whether everything it makes is there."""
        return all(path.exists() for path in self.files) if self.is_done is None else self.is_done()


@dataclass(frozen=True)
class StepResult:
    """How a step ended. `error` is what an attempt in this process raised."""

    state: State
    reason: str = ""
    code: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)
    error: TapfmError | None = field(default=None, compare=False)


class StepDisplay(Protocol):
    """Shows steps as they run. Its methods are called in the main thread only."""

    def start(self, step: Step) -> None:
        """Show that a step is running."""

    def update(self) -> None:
        """Show the progress of running steps; called several times per second while a child process runs."""

    def finish(self, step: Step, result: StepResult) -> None:
        """Show how a step ended, also one that could not run."""


class StepRunner:
    """Runs the steps that are not done yet, in an order in which they can run.

    run_command: runs the command of a step and returns its exit code. It is given a function to call regularly, which
        returns the number of a signal to pass on, or raises SystemExit to stop immediately.
    record: is given the results of all steps at the start and whenever one changes.
    signal_number: returns the signal that asked to stop, if one did: nothing more is started then.
    jobs: steps that run at the same time. One runs in the main thread, more in threads.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        run_command: Callable[[Step, Callable[[], int | None]], int],
        *,
        record: Callable[[Mapping[str, StepResult]], object],
        display: StepDisplay,
        signal_number: Callable[[], int | None] = lambda: None,
        jobs: int = 1,
    ) -> None:
        self._steps, self._run_command, self._jobs = steps, run_command, jobs
        self._record, self._display, self._signal_number = record, display, signal_number
        self._results: dict[str, StepResult] = {}
        self._stop_now = threading.Event()

    def run(self, done: Collection[str]) -> dict[str, StepResult]:
        """Run all steps but those whose keys are in `done`; return the results of all by their keys."""
        self._results = {step.key: StepResult("done" if step.key in done else "not run") for step in self._steps}
        self._record(self._results)
        waiting = [step for step in self._steps if step.key not in done]
        running: dict[Future[StepResult], Step] = {}
        with ThreadPoolExecutor(self._jobs) if self._jobs > 1 else _MainThread() as executor:
            try:
                while running or (waiting and self._signal_number() is None):
                    unfinished = {step.key for step in (*waiting, *running.values())}
                    ready = [step for step in waiting if unfinished.isdisjoint(step.needs)]
                    for step in ready[: self._jobs - len(running)] if self._signal_number() is None else []:
                        waiting.remove(step)
                        if obstacle := self._obstacle(step):
                            self._finish(step, obstacle)
                        else:
                            self._display.start(step)
                            running[executor.submit(self._run_step, step)] = step
                    finished, _ = wait(running, POLL_EVERY_S, FIRST_COMPLETED)
                    self._check()
                    for future in finished:
                        self._finish(running.pop(future), future.result())
            except BaseException:  # such as a second signal: the executor waits for its threads
                self._stop_now.set()
                raise
        return self._results

    def _obstacle(self, step: Step) -> StepResult | None:
        if step.problem:
            return StepResult("failed", step.problem)
        done = {key for key, result in self._results.items() if result.state == "done"}
        return next((StepResult("not run", f"needs {key}") for key in step.needs if key not in done), None)

    def _run_step(self, step: Step) -> StepResult:
        start = time.monotonic()
        try:
            result = self._attempt(step)
        except TapfmError as error:
            result = StepResult("failed", error.message, error.exit_code, error=error)
        except KeyboardInterrupt:
            result = StepResult("not run", "stopped", STOPPED_CODE)
        return replace(result, seconds=time.monotonic() - start)

    def _attempt(self, step: Step) -> StepResult:
        if step.before is not None:
            step.before()
        log_bytes = step.log.stat().st_size if step.log.exists() else 0
        code = 0
        if step.function is not None:
            step.function()
        else:
            code = self._run_command(step, self._check)
        if code == 0 and step.done():
            return StepResult("done")
        if self._signal_number() is not None:
            return StepResult("not run", "stopped", code)
        if code == 0:
            return StepResult("failed", "it ended without an error, but what it should have written is not there")
        return StepResult("failed", failure_reason(code, step.log, log_bytes), code)

    def _check(self) -> int | None:
        if self._stop_now.is_set():
            raise SystemExit
        if threading.current_thread() is threading.main_thread():
            self._display.update()
        return self._signal_number()

    def _finish(self, step: Step, result: StepResult) -> None:
        self._results[step.key] = result
        self._record(self._results)
        if self._signal_number() is None:  # a step that was stopped is not shown as finished
            self._display.finish(step, result)


class _MainThread(Executor):
    """Calls functions at once, in this thread."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future

"""Run the commands of the demo one after another in this process, from the first step that is not done."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from rich.console import Console

from tapfm.demo.folder import DemoFolder
from tapfm.demo.sizes import DemoSize
from tapfm.demo.steps import list_demo_steps
from tapfm.errors import CommandFailedError, Interrupted, RunError
from tapfm.runtime.files import fingerprint, write_atomically
from tapfm.runtime.messages import format_command
from tapfm.runtime.output_folder import check_no_other_files, lock_folder
from tapfm.runtime.steps import Step, StepResult, StepRunner
from tapfm.version import __version__

RunCommand = Callable[[Sequence[str]], int]


def run_demo(size: DemoSize, out: Path, run_command: RunCommand, *, console: Console) -> DemoFolder:
    """Run the demo from the first step that is not done, and return its folder.

    Raises the exception of a step, CommandFailedError if a command exits with an error code, or Interrupted after a
    stop signal.
    """
    folder = DemoFolder(out)
    resume_command = format_command("demo", *size.options, "--out", out)
    if not folder.state.exists():
        check_no_other_files(
            out, hint=f"Use a new folder: {format_command('demo', *size.options, '--out', out / 'demo')}"
        )
    with lock_folder(out, "tapfm demo"):
        state = _read_state(folder, size)
        steps = list_demo_steps(size, folder)
        done = [step.key for step in takewhile(lambda step: step.key in state.done and step.is_done(), steps)]
        if done:
            console.print(f"{len(done)} of {len(steps)} steps already done.", markup=False)
        if len(done) == len(steps):
            return folder
        for step in steps[len(done) + 1 :]:  # steps after the next one start again: remove their old output
            for path in step.expected_outputs:
                _remove(path)
        results = StepRunner(
            steps,
            partial(_run_in_this_process, run_command),
            save_results=partial(_write_state, folder, size, state),
            display=_DemoDisplay(console, steps),
        ).run(done)
    failed = next((step for step in steps if results[step.key].state != "done"), None)
    if failed is None:
        return folder
    result = results[failed.key]
    if result.exception is not None:
        console.print(f"After fixing the error below, resume with: {resume_command}", markup=False, soft_wrap=True)
        raise result.exception
    hint = f"Finished steps are saved. To resume: {resume_command}"
    if result.exit_code > 128:
        console.print(hint, markup=False, soft_wrap=True)
        raise Interrupted(result.exit_code - 128)
    output = f" Its messages are above, its results in {failed.log}." if failed.log.exists() else ""
    raise CommandFailedError(
        f"The step {failed.name} failed: {result.reason.rstrip('.')}.{output}",
        hint=hint,
        exit_code=result.exit_code or 1,
    )


def _run_in_this_process(run_command: RunCommand, step: Step, _: Callable[[], int | None]) -> int:
    step.log.parent.mkdir(parents=True, exist_ok=True)
    with step.log.open("w", encoding="utf-8") as output, contextlib.redirect_stdout(output):
        try:
            return run_command(step.arguments)
        except SystemExit as stop:  # after a second stop signal (Ctrl-C pressed twice)
            return stop.code if isinstance(stop.code, int) else 1


class _DemoDisplay:
    """Prints the title and command of each step, and selected lines of its output. Commands show their own progress."""

    def __init__(self, console: Console, steps: Sequence[Step]) -> None:
        self._console, self._steps = console, steps

    def show_start(self, step: Step) -> None:
        self._console.print(f"\n[bold]{self._steps.index(step) + 1}/{len(self._steps)} {step.title}[/bold]")
        if step.arguments:
            self._console.print(f"$ {format_command(*step.arguments)}", style="cyan", markup=False, soft_wrap=True)

    def show_progress(self) -> None:
        """Show nothing: the running command shows its own progress."""

    def show_result(self, step: Step, result: StepResult) -> None:
        if result.state == "not run" or not step.summary_line_prefixes or not step.log.exists():
            return  # the log may be from an earlier attempt
        for line in step.log.read_text("utf-8").splitlines():
            if line.startswith(step.summary_line_prefixes):
                self._console.print(line, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class _State:
    """Finished steps, and the duration of each step over all attempts."""

    done: set[str]
    seconds: dict[str, float]


def _write_state(folder: DemoFolder, size: DemoSize, earlier: _State, results: Mapping[str, StepResult]) -> None:
    seconds = {key: earlier.seconds.get(key, 0.0) + result.seconds for key, result in results.items()}
    state = {
        "size": size.name,
        "tapfm": __version__,
        "settings_digest": _settings_digest(size),
        "folder": str(folder.path.absolute()),
        "done": sorted(key for key, result in results.items() if result.state == "done"),
        "seconds": {key: round(duration, 1) for key, duration in seconds.items() if duration},
    }
    write_atomically(folder.state, f"{json.dumps(state, indent=2)}\n".encode())


def _read_state(folder: DemoFolder, size: DemoSize) -> _State:
    """Read demo.json, if it exists. Raises RunError if it belongs to a demo of another size or version."""
    try:
        stored = json.loads(folder.state.read_text("utf-8"))
        state = _State(set(stored["done"]), {str(key): float(value) for key, value in stored["seconds"].items()})
        digest, stored_folder = stored["settings_digest"], stored["folder"]
        version = f"{stored['size']}, tapfm {stored['tapfm']}"
    except FileNotFoundError:
        return _State(set(), {})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(
            f"{folder.state} cannot be read ({error}).",
            hint=f"Use another folder with --out, or delete the folder {folder.path}.",
        ) from error
    if digest != _settings_digest(size):
        raise RunError(
            f"{folder.path} contains a demo of another size or version ({version}).",
            hint=f"Use another folder: {format_command('demo', *size.options, '--out', f'{folder.path}-again')}\n"
            f"Or delete {folder.path} first.",
        )
    moved = stored_folder != str(folder.path.absolute())  # predictions contain absolute paths of slides
    return _State({key for key in state.done if not (moved and key.startswith("predict"))}, state.seconds)


def _settings_digest(size: DemoSize) -> str:
    """Return a digest of the arguments of all steps, the settings of the runs and the version of tapfm."""
    arguments = [step.arguments for step in list_demo_steps(size, DemoFolder(Path("demo")))]
    return fingerprint(arguments, size.settings, size.resamples, __version__)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)

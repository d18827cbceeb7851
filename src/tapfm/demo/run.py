"""Run the demo: one command after another in this process; finished steps are kept."""

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
from tapfm.demo.sizes import Size
from tapfm.demo.steps import demo_steps
from tapfm.errors import CommandFailedError, Interrupted, RunError
from tapfm.runtime.files import fingerprint, write_atomically
from tapfm.runtime.messages import format_command
from tapfm.runtime.output_folder import check_no_other_files, lock_folder
from tapfm.runtime.steps import Step, StepResult, StepRunner
from tapfm.version import __version__

RunCommand = Callable[[Sequence[str]], int]


def run_demo(size: Size, out: Path, run_command: RunCommand, *, console: Console) -> DemoFolder:
    """Run the steps that are not done yet. Raises CommandFailedError, or Interrupted after a signal."""
    folder = DemoFolder(out)
    resume = format_command("demo", *size.options, "--out", out)
    if not folder.state.exists():
        check_no_other_files(
            out, hint=f"Give a new folder: {format_command('demo', *size.options, '--out', out / 'demo')}"
        )
    with lock_folder(out, "tapfm demo"):
        before = _read_state(folder, size)
        steps = demo_steps(size, folder)
        done = [step.key for step in takewhile(lambda step: step.key in before.done and step.is_done(), steps)]
        if done:
            console.print(f"{len(done)} of {len(steps)} steps done already.", markup=False)
        if len(done) == len(steps):
            return folder
        for step in steps[len(done) + 1 :]:  # they run again: no old file may remain beside new ones
            for path in step.files:
                _remove(path)
        results = StepRunner(
            steps,
            partial(_run_in_this_process, run_command),
            record=partial(_write_state, folder, size, before),
            display=_DemoDisplay(console, steps),
        ).run(done)
    failed = next((step for step in steps if results[step.key].state != "done"), None)
    if failed is None:
        return folder
    result = results[failed.key]
    if result.error is not None:
        console.print(f"When that is fixed, continue with: {resume}", markup=False, soft_wrap=True)
        raise result.error
    hint = f"Finished steps are kept. To continue: {resume}"
    if result.code > 128:
        console.print(hint, markup=False, soft_wrap=True)
        raise Interrupted(result.code - 128)
    raise CommandFailedError(
        f"The command ended with exit code {result.code}; its output is in {failed.log}.",
        hint=hint,
        exit_code=result.code or 1,
    )


def _run_in_this_process(run_command: RunCommand, step: Step, _: Callable[[], int | None]) -> int:
    step.log.parent.mkdir(parents=True, exist_ok=True)
    with step.log.open("w", encoding="utf-8") as output, contextlib.redirect_stdout(output):
        try:
            return run_command(step.arguments)
        except SystemExit as stop:  # a second signal
            return stop.code if isinstance(stop.code, int) else 1


class _DemoDisplay:
    """Prints the title and command of each step, then some lines of its output. Commands show their own progress."""

    def __init__(self, console: Console, steps: Sequence[Step]) -> None:
        self._console, self._steps = console, steps

    def start(self, step: Step) -> None:
        self._console.print(f"\n[bold]{self._steps.index(step) + 1}/{len(self._steps)} {step.title}[/bold]")
        if step.arguments:
            self._console.print(f"$ {format_command(*step.arguments)}", style="cyan", markup=False, soft_wrap=True)

    def update(self) -> None:
        pass

    def finish(self, step: Step, result: StepResult) -> None:
        if result.state == "not run" or not step.shown_prefixes or not step.log.exists():
            return  # a log may be of an earlier attempt
        for line in step.log.read_text("utf-8").splitlines():
            if line.startswith(step.shown_prefixes):
                self._console.print(line, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class _State:
    """Steps that are done, and the seconds of each in all attempts."""

    done: set[str]
    seconds: dict[str, float]


def _write_state(folder: DemoFolder, size: Size, before: _State, results: Mapping[str, StepResult]) -> None:
    seconds = {key: before.seconds.get(key, 0.0) + result.seconds for key, result in results.items()}
    state = {
        "size": size.name,
        "tapfm": __version__,
        "settings": _settings_digest(size),
        "where": str(folder.path.absolute()),
        "done": sorted(key for key, result in results.items() if result.state == "done"),
        "seconds": {key: round(each, 1) for key, each in seconds.items() if each},
    }
    write_atomically(folder.state, f"{json.dumps(state, indent=2)}\n".encode())


def _read_state(folder: DemoFolder, size: Size) -> _State:
    """Read demo.json, if there is one. Raises RunError if it is of another demo."""
    try:
        read = json.loads(folder.state.read_text("utf-8"))
        state = _State(set(read["done"]), {str(key): float(each) for key, each in read["seconds"].items()})
        settings, where, demo = read["settings"], read["where"], f"{read['size']}, tapfm {read['tapfm']}"
    except FileNotFoundError:
        return _State(set(), {})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(
            f"{folder.state} cannot be read ({error}).", hint="Give another folder with --out, or remove this one."
        ) from error
    if settings != _settings_digest(size):
        raise RunError(
            f"{folder.path} holds a demo of another size or version ({demo}).",
            hint=f"Give another folder: {format_command('demo', *size.options, '--out', f'{folder.path}-again')}\n"
            "Or remove that one first.",
        )
    moved = where != str(folder.path.absolute())  # predictions contain the paths of their slides
    return _State({key for key in state.done if not (moved and key.startswith("predict"))}, state.seconds)


def _settings_digest(size: Size) -> str:
    """Return a digest of all that the results depend on."""
    words = [step.arguments for step in demo_steps(size, DemoFolder(Path("demo")))]
    return fingerprint(words, size.settings, size.resamples, __version__)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)

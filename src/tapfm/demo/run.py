"""The demo itself: one step after another, each told; what is done is kept."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import typer
from rich.console import Console

from tapfm.demo.sizes import Size
from tapfm.demo.steps import DemoFolder, Step, steps_of
from tapfm.errors import RunError, TapfmError
from tapfm.runtime.files import fingerprint, write_atomically
from tapfm.runtime.messages import command
from tapfm.runtime.output_folder import locked
from tapfm.version import __version__

NAME = "tapfm demo"
Act = Callable[[Sequence[str]], int]


def run_demo(size: Size, out: Path, act: Act, *, console: Console) -> DemoFolder:
    """Do what is left to do. Raises `typer.Exit` where a command failed, or was stopped by a signal."""
    folder = DemoFolder(out)
    again = command("demo", *size.options, "--out", out)
    refuse_other_files(folder, size)
    with locked(out, NAME):
        state = begin(folder, size)
        steps = steps_of(size, folder)
        first = next((n for n, step in enumerate(steps) if not (step.name in state.done and step.is_made)), len(steps))
        if first:
            console.print(f"{first} of {len(steps)} steps were done before.", markup=False)
        for step in steps[first:]:
            state.done.discard(step.name)
        for step in steps[first + 1 :]:  # they are done again: nothing old may stand beside what is new
            for path in step.makes:
                remove(path)
        for number, step in enumerate(steps[first:], first + 1):
            console.print(f"\n[bold]{number}/{len(steps)} {step.title}[/bold]")
            if step.words:
                console.print(f"$ {command(*step.words)}", style="cyan", markup=False, soft_wrap=True)
            began = time.monotonic()
            try:
                do_step(step, folder, act, console)
            except (typer.Exit, click.Abort, KeyboardInterrupt) as stopped:
                code = stopped.exit_code if isinstance(stopped, typer.Exit) else 130
                console.print(f"What is done is kept; to go on: {again}", markup=False, soft_wrap=True)
                raise typer.Exit(code) from None
            except TapfmError:
                console.print(f"When that is mended, go on with: {again}", markup=False, soft_wrap=True)
                raise
            else:
                state.done.add(step.name)
            finally:
                state.seconds[step.name] = state.seconds.get(step.name, 0.0) + time.monotonic() - began
                state.write(folder, size)
    return folder


def do_step(step: Step, folder: DemoFolder, act: Act, console: Console) -> None:
    """Do one step; its result goes to a file, of which some lines are shown."""
    if step.before is not None:
        step.before()
    if not step.words:
        from tapfm.demo.planted import measure_planted

        measure_planted(folder)
        return
    log = folder.path / "logs" / f"{step.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as said, contextlib.redirect_stdout(said):
        code = act(step.words)
    for line in log.read_text("utf-8").splitlines():
        if line.strip() and line.startswith(step.says):
            console.print(line, markup=False, soft_wrap=True)
    if code >= 128:  # a signal: told by the command itself
        raise typer.Exit(code)
    if code or not step.is_made:
        console.print(f"That ended with exit code {code}; its result is in {log}.", markup=False, soft_wrap=True)
        raise typer.Exit(code or 1)


@dataclass
class State:
    """Which steps are done, and how long each was worked on, all attempts together."""

    done: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)

    def write(self, folder: DemoFolder, size: Size) -> None:
        """Write demo.json."""
        state = {"size": size.name, "tapfm": __version__, "settings": settings_of(size)}
        state |= {"where": str(folder.path.absolute())}
        seconds = {name: round(each, 1) for name, each in self.seconds.items()}
        text = json.dumps({**state, "done": sorted(self.done), "seconds": seconds}, indent=2)
        write_atomically(folder.state, f"{text}\n".encode())


def refuse_other_files(folder: DemoFolder, size: Size) -> None:
    """Keep what is not of a demo: its steps would write over it."""
    if folder.state.exists() or not folder.path.is_dir():
        return
    if others := sorted(path.name for path in folder.path.iterdir() if not path.name.startswith(".")):
        raise RunError(
            f"{folder.path} has other files in it, such as {others[0]}.",
            hint=f"Give a new folder: {command('demo', *size.options, '--out', folder.path / 'demo')}",
        )


def begin(folder: DemoFolder, size: Size) -> State:
    """Read how far a demo is; what is in the folder has to be this very one."""
    try:
        noted = json.loads(folder.state.read_text("utf-8"))
        state = State(set(noted["done"]), {str(name): float(each) for name, each in noted["seconds"].items()})
        settings, where, what = noted["settings"], noted["where"], f"{noted['size']}, tapfm {noted['tapfm']}"
    except FileNotFoundError:
        state = State()
        state.write(folder, size)
        return state
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(
            f"{folder.state} cannot be read ({error}).", hint="Give another folder with --out, or remove this one."
        ) from error
    if settings != settings_of(size):
        raise RunError(
            f"{folder.path} holds a demo of another size or version ({what}).",
            hint=f"Give another folder: {command('demo', *size.options, '--out', f'{folder.path}-again')}\n"
            "Or remove that one first.",
        )
    if where != str(folder.path.absolute()):  # predictions know where their slides are
        state.done = {name for name in state.done if not name.startswith("predict")}
    return state


def settings_of(size: Size) -> str:
    """Digest all that decides what comes out."""
    words = [step.words for step in steps_of(size, DemoFolder(Path("demo")))]
    return fingerprint(words, size.settings, size.resamples, __version__)


def remove(path: Path) -> None:
    """Remove what a step made, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)

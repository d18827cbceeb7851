"""The demo itself: one step after another, each told; what is done is kept."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import typer
from rich.console import Console

import tapfm
from tapfm.app.advice import command
from tapfm.app.demo.sizes import Size
from tapfm.app.demo.steps import DemoFolder, Step, steps_of
from tapfm.app.output_folder import locked
from tapfm.errors import RunError, TapfmError
from tapfm.storage import fingerprint, write_atomically

Act = Callable[[Sequence[str]], int]


def run_demo(size: Size, out: Path, *, console: Console, act: Act | None = None) -> DemoFolder:
    """Do what is left to do. Raises `typer.Exit` where a command was stopped by a signal."""
    folder = DemoFolder(out)
    again = command("demo", *size.options, "--out", out)
    with locked(out, "tapfm demo"):
        done = read_state(folder, size)
        steps = steps_of(size, folder)
        first = first_to_do(steps, done, size)
        if first == len(steps):
            console.print(f"All {len(steps)} steps were done before.", markup=False)
            return folder
        if first:
            console.print(f"{first} of {len(steps)} steps were done before.", markup=False)
        for number, step in enumerate(steps[first:], first + 1):
            console.print(f"\n[bold]{number}/{len(steps)} {step.title}[/bold]")
            if step.words:
                console.print(f"$ {command(*step.words)}", style="cyan", markup=False, soft_wrap=True)
            began = time.monotonic()
            try:
                do_step(step, folder, act or in_this_process, console)
            except (typer.Exit, click.Abort, KeyboardInterrupt) as stopped:
                code = stopped.exit_code if isinstance(stopped, typer.Exit) else 130
                console.print(f"Stopped. What is done is kept; go on with: {again}", markup=False, soft_wrap=True)
                raise typer.Exit(code) from None
            except TapfmError:
                console.print(f"When that is mended, go on with: {again}", markup=False, soft_wrap=True)
                raise
            done[step.name] = {"key": key_of(step, size), "seconds": round(time.monotonic() - began, 1)}
            write_state(folder, size, done)
    return folder


def do_step(step: Step, folder: DemoFolder, act: Act, console: Console) -> None:
    """Do one step; its result goes to a file, of which some lines are shown."""
    if step.before is not None:
        step.before()
    if not step.words:
        from tapfm.app.demo.planted import measure_planted

        measure_planted(folder)
        return
    log = folder.path / "logs" / f"{step.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as said, contextlib.redirect_stdout(said):
        code = act(step.words)
    if code >= 128:  # a signal: told by the command itself
        raise typer.Exit(code)
    if code or not step.made.exists():
        raise RunError(
            f"{command(*step.words)} ended with exit code {code}.", hint=f"What it said is above, and in {log}."
        )
    for line in log.read_text("utf-8").splitlines():
        if line.strip() and line.startswith(step.says):
            console.print(line, markup=False, soft_wrap=True)


def in_this_process(words: Sequence[str]) -> int:
    """Run a command as if it were typed; torch is loaded once for all of them."""
    from tapfm.app.cli import app

    return app(list(words), prog_name="tapfm", standalone_mode=False) or 0


def key_of(step: Step, size: Size) -> str:
    """Tell a step from the same one of another size or version."""
    return fingerprint(step.words, asdict(size), tapfm.__version__)


def first_to_do(steps: Sequence[Step], done: dict[str, Any], size: Size) -> int:
    """Find the first step that is not done, or whose file is gone: it and all that follow are done again."""
    for number, step in enumerate(steps):
        if done.get(step.name, {}).get("key") != key_of(step, size) or not step.made.exists():
            return number
    return len(steps)


def read_state(folder: DemoFolder, size: Size) -> dict[str, Any]:
    """Read which steps are done; a demo of another size is not mixed with this one."""
    try:
        state = json.loads(folder.state.read_text("utf-8"))
        name, done = str(state["size"]), dict(state["done"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}  # every command knows for itself what is done
    if name != size.name:
        raise RunError(
            f"{folder.path} holds a demo of another size ({name}).",
            hint=f"Give another folder: {command('demo', *size.options, '--out', f'{folder.path}-{size.name}')}",
        )
    return done


def write_state(folder: DemoFolder, size: Size, done: dict[str, Any]) -> None:
    """Write which steps are done."""
    text = json.dumps({"size": size.name, "tapfm": tapfm.__version__, "done": done}, indent=2)
    write_atomically(folder.state, f"{text}\n".encode())

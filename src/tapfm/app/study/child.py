"""A command of a study in a process of its own: it frees all it used, its memory can be measured, and it may die."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tapfm.app.advice import command
from tapfm.processes import death_of

PROGRAM = "from tapfm.app.study.child import main; main()"
PARENT = "TAPFM_STUDY_PROCESS"
LOOK_EVERY_S = 0.3
PATIENCE_S = 10.0
REASON_CHARACTERS = 500


def run_child(
    words: Sequence[str],
    log: Path,
    look: Callable[[], int | None],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run `tapfm WORDS`, what it says added to a file; gives its exit code.

    `look` is called again and again, and gives the number of a signal to pass on: once, as the child saves on the
    first and gives up on the second. Its session is its own, so that Ctrl-C comes to it from here alone.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as said:
        said.write(f"$ {command(*words)}\n".encode())
        said.flush()
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**environment, **os.environ, PARENT: str(os.getpid())},  # what the user has set stays
            start_new_session=True,
        )
        told = False
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(LOOK_EVERY_S)
                number = look()
                if number is not None and not told:
                    process.send_signal(number)
                    told = True
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE_S)
                process.kill()
                process.wait()


def reason_of(code: int, log: Path, since_bytes: int) -> str:
    """Say why a command failed: its own error, else its last words."""
    with log.open("rb") as file:
        file.seek(since_bytes)
        lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines()]
    found = [index for index, line in enumerate(lines) if line.startswith("error:")]
    if found:
        return " ".join(line.strip() for line in lines[found[-1] :]).removeprefix("error:").strip()[:REASON_CHARACTERS]
    last = next((line.strip() for line in reversed(lines) if line and not line.startswith("$ ")), "")
    said = f": {last}" if last else ""
    return f"{death_of(code)}{said}"[:REASON_CHARACTERS]


def main() -> None:
    """Run the command line as a child: asked to stop, that is to save, when the study is gone."""
    parent = int(os.environ.pop(PARENT))
    threading.Thread(target=stop_with, args=(parent,), daemon=True).start()
    from tapfm.app.cli import main as command_line

    command_line()


def stop_with(parent: int) -> None:
    """Wait until this process is an orphan."""
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)

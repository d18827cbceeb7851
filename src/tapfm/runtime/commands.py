"""Run a tapfm command in a process of its own: its memory is freed and can be measured, and a crash ends it alone."""

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

from tapfm.runtime.messages import command
from tapfm.runtime.workers import death_of

PARENT = "TAPFM_PARENT_PROCESS"
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
            [sys.executable, "-m", "tapfm", *words],
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


def follow_parent() -> None:
    """In a command that `run_child` started: stop, which saves first, when its parent is gone."""
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        threading.Thread(target=stop_with, args=(int(parent),), daemon=True).start()


def stop_with(parent: int) -> None:
    """Wait until this process is an orphan."""
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)

"""Run a tapfm command in a child process, so that its memory can be measured and a crash ends nothing else."""

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
from tapfm.runtime.workers import describe_exit

_PARENT = "TAPFM_PARENT_PROCESS"
POLL_EVERY_S = 0.3
_TERMINATE_TIMEOUT_S = 10.0
_REASON_CHARACTERS = 500


def run_child(
    words: Sequence[str],
    log: Path,
    check: Callable[[], int | None],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run `tapfm WORDS`, append its output to a log, and return its exit code.

    `check` is called several times per second. The first signal number that it returns is sent to the child, once: a
    second signal would keep the child from saving. The child has its own session, so Ctrl-C does not reach it directly.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"$ {command(*words)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "tapfm", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, **os.environ, _PARENT: str(os.getpid())},  # what the user has set stays
            start_new_session=True,
        )
        signalled = False
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(POLL_EVERY_S)
                number = check()
                if number is not None and not signalled:
                    process.send_signal(number)
                    signalled = True
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TERMINATE_TIMEOUT_S)
                process.kill()
                process.wait()


def failure_reason(code: int, log: Path, since_bytes: int) -> str:
    """Return why a command failed: its error message, else how it ended and its last line of output."""
    with log.open("rb") as file:
        file.seek(since_bytes)
        lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines()]
    found = [index for index, line in enumerate(lines) if line.startswith("error:")]
    if found:
        return " ".join(line.strip() for line in lines[found[-1] :]).removeprefix("error:").strip()[:_REASON_CHARACTERS]
    last = next((line.strip() for line in reversed(lines) if line and not line.startswith("$ ")), "")
    return f"{describe_exit(code)}{f': {last}' if last else ''}"[:_REASON_CHARACTERS]


def follow_parent() -> None:
    """In a command that `run_child` started: when the parent process is gone, stop and save."""
    parent = os.environ.pop(_PARENT, None)
    if parent is not None:
        threading.Thread(target=_stop_with, args=(int(parent),), daemon=True).start()


def _stop_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)

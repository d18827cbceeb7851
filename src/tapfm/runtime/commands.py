"""Run tapfm commands in child processes: a crash does not affect the caller, and memory can be measured per command."""

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

from tapfm.runtime.messages import format_command
from tapfm.runtime.workers import describe_exit

_PARENT_VARIABLE = "TAPFM_PARENT_PROCESS"  # environment variable with the process id of the parent
POLL_INTERVAL_S = 0.3  # between checks whether a signal was received or another process has exited
_TERMINATE_TIMEOUT_S = 10.0  # from SIGTERM until a child that has not exited is killed
_MAX_REASON_CHARACTERS = 500


def run_child_command(
    arguments: Sequence[str],
    log: Path,
    poll_signal: Callable[[], int | None],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run `tapfm ARGUMENTS`, append its output to a log file, and return its exit code.

    poll_signal: called several times per second; returns the number of a signal to send to the child process, or None.
        Only the first signal is sent: a second one would stop the child before its work is saved.
    environment: default values of environment variables; values that the user has set override them.

    The child has its own session, so Ctrl-C in the terminal only reaches this process.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"$ {format_command(*arguments)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "tapfm", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, **os.environ, _PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )
        signal_sent = False
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(POLL_INTERVAL_S)
                number = poll_signal()
                if number is not None and not signal_sent:
                    process.send_signal(number)
                    signal_sent = True
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TERMINATE_TIMEOUT_S)
                process.kill()
                process.wait()


def read_failure_reason(exit_code: int, log: Path, start_byte: int) -> str:
    """Return why a command failed, from its log: the error message, or else the exit code and the last line of output.

    start_byte: where the output of the command starts in the log, which may also contain earlier commands.
    """
    with log.open("rb") as file:
        file.seek(start_byte)
        lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines()]
    error_lines = [index for index, line in enumerate(lines) if line.startswith("error:")]
    if error_lines:
        return (
            " ".join(line.strip() for line in lines[error_lines[-1] :])
            .removeprefix("error:")
            .strip()[:_MAX_REASON_CHARACTERS]
        )
    last_line = next((line.strip() for line in reversed(lines) if line and not line.startswith("$ ")), "")
    return f"{describe_exit(exit_code)}{f': {last_line}' if last_line else ''}"[:_MAX_REASON_CHARACTERS]


def stop_when_parent_exits() -> None:
    """Send SIGTERM to this process when its parent exits, if `run_child_command` started this process."""
    parent_id = os.environ.pop(_PARENT_VARIABLE, None)
    if parent_id is not None:
        threading.Thread(target=_terminate_when_parent_exits, args=(int(parent_id),), daemon=True).start()


def _terminate_when_parent_exits(parent_id: int) -> None:
    while os.getppid() == parent_id:
        time.sleep(POLL_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)

"""Run `tapfm` as a user does; in a process of its own where signals or its end are looked at."""

import contextlib
import io
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tapfm.app.cli import main

PROGRAM = [sys.executable, "-c", "from tapfm.app.cli import main; main()"]


def tapfm(*arguments, **environment):
    """Run a command in this process, which has loaded everything already; gives what it said and its exit code."""
    out, error, before = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["tapfm", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    signal.signal(signal.SIGTERM, before)
    stdout, stderr = out.getvalue(), error.getvalue()
    return SimpleNamespace(returncode=ended.value.code or 0, stdout=stdout, stderr=stderr, said=stdout + stderr)


def start(*arguments):
    return subprocess.Popen([*PROGRAM, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        with contextlib.suppress(subprocess.TimeoutExpired):  # it still runs, and may have both cores
            process.wait(timeout=0.01)
            assert condition(), process.communicate()
            return

"""Run `tapfm` as a user does, in a process of its own."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tapfm.app.cli import main

PROGRAM = [sys.executable, "-c", "from tapfm.app.cli import main; main()"]


def tapfm(*arguments, **environment):
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def start(*arguments):
    return subprocess.Popen([*PROGRAM, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        os.sched_yield()


def tapfm_here(*arguments):
    """Run a command in this process, which has torch already; gives what it said and its exit code."""
    said, before = io.StringIO(), signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tapfm", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    signal.signal(signal.SIGTERM, before)
    return SimpleNamespace(returncode=ended.value.code or 0, said=said.getvalue())

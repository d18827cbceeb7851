"""Run `tapfm` as a user does; in a process of its own where signals or its end are looked at."""

import contextlib
import io
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tapfm.cli.main import main

PROGRAM = [sys.executable, "-c", "from tapfm.cli.main import main; main()"]


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


def script(path, *arguments):
    """Run a Python file as `python FILE` does, in this process, which has loaded torch already; gives the same."""
    out, error, before, code = io.StringIO(), io.StringIO(), set(sys.modules), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        patch.setattr(sys, "path", [str(Path(path).parent), *sys.path])  # its neighbours, which it imports
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
    for name in set(sys.modules) - before:  # so that a neighbour is nobody else's module of that name
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == Path(path).parent:
            del sys.modules[name]
    stdout, stderr = out.getvalue(), error.getvalue()
    return SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr, said=stdout + stderr)


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

"""Run `tapfm` and Python scripts as a user does, in this process or in a child process."""

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
    """Run a command in this process, where torch is already imported. Return its exit code and output."""
    stdout, stderr, handler = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["tapfm", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
    signal.signal(signal.SIGTERM, handler)
    return _make_result(stopped.value.code or 0, stdout, stderr)


def run_script(path, *arguments):
    """Run a Python file like `python FILE`, but in this process. Return its exit code and output."""
    stdout, stderr, modules, code = io.StringIO(), io.StringIO(), set(sys.modules), 0
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        patch.setattr(sys, "path", [str(Path(path).parent), *sys.path])  # scripts import modules of their folder
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as stopped:
            code = stopped.code or 0
    for name in set(sys.modules) - modules:  # other tests may import modules of the same names from other folders
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == Path(path).parent:
            del sys.modules[name]
    return _make_result(code, stdout, stderr)


def _make_result(code, stdout, stderr):
    out, err = stdout.getvalue(), stderr.getvalue()
    return SimpleNamespace(returncode=code, stdout=out, stderr=err, output=out + err)


def start_tapfm(*arguments):
    """Start a command in a child process."""
    return subprocess.Popen([*PROGRAM, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process):
    """Wait until a condition is true. Fail if the process exits first or after two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
            assert condition(), process.communicate()
            return

"""Run `tapfm` as a user does, in a process of its own."""

import os
import subprocess
import sys
import time

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

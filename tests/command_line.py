"""Run `tapfm` as a user does, in a process of its own."""

import os
import subprocess
import sys

PROGRAM = [sys.executable, "-c", "from tapfm.app.cli import main; main()"]


def tapfm(*arguments, **environment):
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)], env=os.environ | environment, capture_output=True, text=True, check=False
    )

"""Measure the start-up time of commands: Python itself, `tapfm --help`, the help of one command, and importing torch.

    python benchmarks/startup.py
    python benchmarks/startup.py --json out/startup.json

Each command runs in a new process and is timed from start to exit (wall time). The commands take turns. The first round
is not counted: it warms up the page cache and writes bytecode. Prints Markdown: the median and the range.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tapfm

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "tapfm --help": ["-m", "tapfm", "--help"],
    "tapfm tile --help": ["-m", "tapfm", "tile", "--help"],
    "python -c 'import torch'": ["-c", "import torch"],
}


@dataclass
class Row:
    """Times of one command."""

    command: str
    median_s: float
    lowest_s: float
    highest_s: float


def time_command(arguments: list[str]) -> float:
    """Run Python with arguments and return the seconds. Bytecode is written, as is Python's default."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=environment, check=True)
    return time.perf_counter() - start


def measure(rounds: int) -> list[Row]:
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, arguments in COMMANDS.items():
            duration = time_command(arguments)
            if number:  # the first round is a warm-up
                seconds[name].append(duration)
    return [Row(name, statistics.median(each), min(each), max(each)) for name, each in seconds.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    rows = measure(arguments.rounds)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(
        f"tapfm {tapfm.__version__}, Python {platform.python_version()}, {processor_name()}, {cores} cores; "
        f"median of {arguments.rounds}\n"
    )
    print("| command | seconds | range |\n|---|--:|--:|")
    for row in rows:
        print(f"| `{row.command}` | {row.median_s:.2f} | {row.lowest_s:.2f} to {row.highest_s:.2f} |")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def processor_name() -> str:
    """Return the name of the processor on Linux, else the machine type."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()

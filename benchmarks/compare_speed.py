"""Compare the speed of this checkout with an older commit, on the CPU.

    python benchmarks/compare_speed.py main                     # all benchmarks; 7 to 10 minutes on two cores
    python benchmarks/compare_speed.py v0.1.0 --only step --repeats 8
    python benchmarks/compare_speed.py e693635 --json out/speed.json

Old is the given commit, new is the working tree with all uncommitted changes. Both are copied to a temporary folder
first, so you can edit files while the comparison runs. The two versions take turns (old new, new old, old new, ...),
never at the same time, with one thread each. The parts are:

    step          one adaptation step: benchmarks/adaptation_step.py of each version
    data-loading  training from slides, by number of workers: benchmarks/data_loading.py of each version
    predict       the predict command on synthetic slides, with a model that each version trains for one epoch: the
                  whole command, and the same command again in the same process, with all modules imported

Prints Markdown. All values are times, so a ratio new/old below 1 means that the new version is faster. The ratio is
the median of the paired ratios, one for each repeat; their range shows the noise of the machine. Progress is printed to
stderr. The exit code is 2 if the commit is unknown.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib.metadata
import io
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("step", "data-loading", "predict")
# Scripts of a part, newest name first: older versions have older names.
SCRIPTS = {"step": ("adaptation_step.py",), "data-loading": ("data_loading.py", "feeding.py")}
STEP_OPTIONS = ("--tiles", "32", "--chunk", "8", "--repeats", "5")
DATA_LOADING_OPTIONS = ("--encoder", "tapfm-pocket", "--tiles", "40", "--slides", "2", "--epochs", "2")
DATA_LOADING_WORKERS = ("--workers", "0", "1")
SYNTH_OPTIONS = (
    *("--slides", "6", "--external", "0", "--tiles-per-slide", "60"),
    *("--prevalence", "0.5", "--difficulty", "easy"),
)
SYNTH_FRACTIONS = ("--fractions", "0.34", "0.33", "0.33")
RUN_COMMAND = "from {module} import {function} as main; main()"
# Runs a command twice, with different --out, and writes the seconds of the second run.
RUN_COMMAND_TWICE = """
import json, sys, time
from {module} import {function} as main

seconds_file, *arguments = sys.argv[1:]

def run(out):
    sys.argv = ["{script}", *arguments, "--out", out]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise

run("predicted-first")
start = time.perf_counter()
run("predicted-again")
with open(seconds_file, "w") as file:
    json.dump(time.perf_counter() - start, file)
"""

Times = dict[str, float]  # seconds by benchmark


@dataclass(frozen=True)
class Version:
    """A copy of the source code that can be measured."""

    name: str  # old or new
    commit: str  # for messages
    source: Path
    work_folder: Path  # for the files that its commands write
    script: str  # name of the command; pyproject.toml maps it to a function in a module
    module: str
    function: str

    def environment(self) -> dict[str, str]:
        """Return the environment of its processes: its own code and caches, one thread, no GPU."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return variables | {
            "PYTHONPATH": str(self.source / "src"),
            "XDG_CACHE_HOME": str(self.work_folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def run(self, task: str, arguments: Sequence[str | Path]) -> float:
        """Run Python with these arguments and return the seconds. Exit if it fails."""
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=self.work_folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - start
        if done.returncode != 0:
            output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])
            raise SystemExit(f"{self.name} ({self.commit}): {task} failed with exit code {done.returncode}:\n{output}")
        return seconds

    def run_command(self, *arguments: str | Path) -> None:
        """Run a command of this version, for example `tapfm tile`."""
        program = RUN_COMMAND.format(module=self.module, function=self.function)
        self.run(f"{self.script} {arguments[0]}", ["-c", program, *arguments])

    def find_script(self, part: str) -> Path | None:
        """Return the benchmark script of a part, or None if this version has none."""
        scripts = (self.source / "benchmarks" / name for name in SCRIPTS[part])
        return next((script for script in scripts if script.exists()), None)

    def check_import(self) -> None:
        """Check that its processes import its own code, not an installed package."""
        package = self.module.partition(".")[0]
        program = f"import sys, {package}; sys.exit(not {package}.__file__.startswith(sys.argv[1]))"
        self.run(f"importing {package} from {self.source / 'src'}", ["-c", program, self.source / "src"])


@dataclass(frozen=True)
class Row:
    """One benchmark: medians in seconds, and ratios new/old."""

    benchmark: str
    old_s: float
    new_s: float
    ratio: float
    lowest_ratio: float
    highest_ratio: float


def time_step(version: Version) -> Times:
    """Time the adaptation step."""
    results, script = version.work_folder / "step.json", version.find_script("step")
    assert script is not None
    version.run(script.name, [script, *STEP_OPTIONS, "--json", results])
    rows = json.loads(results.read_text())["rows"]
    # older versions use the key "way"
    return {f"adaptation step, {row.get('strategy') or row['way']}": row["median_s"] for row in rows}


def time_data_loading(version: Version) -> Times:
    """Time augmentation and training from slides, per tile."""
    results, script = version.work_folder / "data-loading.json", version.find_script("data-loading")
    assert script is not None
    version.run(script.name, [script, *DATA_LOADING_OPTIONS, *DATA_LOADING_WORKERS, "--json", results])
    return read_data_loading_times(json.loads(results.read_text()))


def read_data_loading_times(results: dict[str, object]) -> Times:
    """Convert the tiles per second of data_loading.py to seconds per tile."""
    augmentation, rows = results["augmentation"], results["rows"]
    assert isinstance(augmentation, dict)
    assert isinstance(rows, list)
    times = {f"augmentation ({variant}), per tile": 1 / speed for variant, speed in augmentation.items()}
    for row in rows:
        label = "step alone" if row["workers"] is None else f"--workers {row['workers']}"
        times[f"training, {label}, per tile"] = 1 / row["tiles_per_second"]
    return times


def time_predict(version: Version) -> Times:
    """Time the predict command from start to exit, and again in the same process."""
    seconds_file, cohort = version.work_folder / "again.json", version.work_folder.parent / "synthetic" / "cohort.csv"
    program = RUN_COMMAND_TWICE.format(script=version.script, module=version.module, function=version.function)
    arguments = ("predict", cohort, "--model", "run", "--device", "cpu", "--workers", "1")
    both = version.run(f"{version.script} predict", ["-c", program, seconds_file, *arguments])
    again = float(json.loads(seconds_file.read_text()))
    for name in ("predicted-first", "predicted-again"):
        shutil.rmtree(version.work_folder / name)
    return {"predict, whole command": both - again, "predict, again in the same process": again}


def train_models(versions: Sequence[Version]) -> None:
    """Generate synthetic slides once. With each version, tile them and train a model for one epoch."""
    synthetic = versions[0].work_folder.parent / "synthetic"
    report(f"generating slides with {versions[-1].name}")
    versions[-1].run_command("synth", synthetic, *SYNTH_OPTIONS, *SYNTH_FRACTIONS)
    cohort = synthetic / "cohort.csv"
    for version in versions:
        report(f"training a model with {version.name} ({version.commit})")
        version.run_command("tile", cohort, "--out", "tiles")
        data = ("--cohort", cohort, "--tiles", "tiles")
        version.run_command("config", *data, "--encoder", "tapfm-pocket", "--out", "run.toml")
        options = ("--set", "schedule.epochs=1", "--device", "cpu", "--workers", "1")
        version.run_command("train", "run.toml", "--out", "run", *options)


def export_commit(revision: str, folder: Path) -> str:
    """Write the files of a commit to a folder, and return its short name. Exit with code 2 if it is unknown."""
    commit = run_git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if commit is None:
        exit_with_error(
            f"Unknown commit '{revision}' in {ROOT.name}/. Pass a commit, tag or branch of this repository."
        )
    archive = run_git("archive", "--format=zip", commit.decode().strip())
    if archive is None:
        exit_with_error(f"git could not export commit '{revision}'. Run `git fsck` to check the repository.")
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        file.extractall(folder)
    short = (run_git("rev-parse", "--short", commit.decode().strip()) or commit).decode().strip()
    return short if revision.startswith(short) else f"{revision}, {short}"


def copy_working_tree(folder: Path) -> str:
    """Copy the files of this checkout that the benchmarks need, and return the name of its commit."""
    folder.mkdir()
    for name in ("src", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    head = (run_git("rev-parse", "--short", "HEAD") or b"unknown commit").decode().strip()
    changed = run_git("status", "--porcelain", "--", "src", "benchmarks", "pyproject.toml")
    return f"{head} with uncommitted changes" if changed else head


def run_git(*arguments: str) -> bytes | None:
    """Run git in this checkout and return its output, or None if it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError:
        exit_with_error("git was not found. Install git: it is needed to read the older version.")
    return done.stdout if done.returncode == 0 else None


def read_entry_point(source: Path) -> tuple[str, str, str]:
    """Return name, module and function of the command of a checkout: the first one in pyproject.toml."""
    file = source / "pyproject.toml"
    scripts = tomllib.loads(file.read_text(encoding="utf-8"))["project"].get("scripts", {}) if file.exists() else {}
    if not scripts:
        exit_with_error("This version has no command: pyproject.toml has no [project.scripts]. Choose a later commit.")
    script, target = next(iter(scripts.items()))
    module, _, function = target.partition(":")
    return script, module, function


def prepare_version(name: str, commit: str, source: Path) -> Version:
    """Compile the source to bytecode, so that this is not measured, and check that it is imported."""
    script, module, function = read_entry_point(source)
    work_folder = source.parent / f"{name}-work"
    work_folder.mkdir()
    compileall.compile_dir(source / "src", quiet=2)
    version = Version(name, commit, source, work_folder, script, module, function)
    version.check_import()
    return version


def order_versions(versions: Sequence[Version], repeat: int) -> list[Version]:
    """Return the versions in alternating order, so that slow changes of the machine's speed cancel out."""
    return list(versions) if repeat % 2 == 0 else list(reversed(versions))


def measure(versions: Sequence[Version], parts: Sequence[str], repeats: int) -> dict[str, list[Times]]:
    """Run all parts with the versions in turn. Return the times of each version, by repeat."""
    timers: dict[str, Callable[[Version], Times]] = {
        "step": time_step,
        "data-loading": time_data_loading,
        "predict": time_predict,
    }
    if "predict" in parts:
        train_models(versions)
    times: dict[str, list[Times]] = {version.name: [{} for _ in range(repeats)] for version in versions}
    for repeat in range(repeats):
        for part in parts:
            for version in order_versions(versions, repeat):
                report(f"repeat {repeat + 1} of {repeats}: {part}, {version.name}")
                times[version.name][repeat] |= timers[part](version)
    return times


def compare(old: Sequence[Times], new: Sequence[Times]) -> list[Row]:
    """Compare the benchmarks that both versions have. Each repeat has its own ratio."""
    rows = []
    for benchmark in (name for name in old[0] if name in new[0]):
        old_times, new_times = ([repeat[benchmark] for repeat in each] for each in (old, new))
        ratios = [after / before for before, after in zip(old_times, new_times, strict=True)]
        old_s, new_s, ratio = (statistics.median(values) for values in (old_times, new_times, ratios))
        rows.append(Row(benchmark, old_s, new_s, ratio, min(ratios), max(ratios)))
    return rows


def format_table(rows: Sequence[Row]) -> str:
    lines = [
        "| benchmark | old, median | new, median | time new/old (lower is better) | range |",
        "|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.benchmark} | {format_seconds(row.old_s)} | {format_seconds(row.new_s)} | {row.ratio:.2f} | "
        f"{row.lowest_ratio:.2f} to {row.highest_ratio:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def describe_machine() -> str:
    """Return the processor's name, the number of cores, and the versions of Python and torch."""
    lines: list[str] = []
    with contextlib.suppress(OSError):  # not Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    torch_version = importlib.metadata.version("torch")
    return f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch_version}"


def report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def exit_with_error(message: str) -> NoReturn:
    """Print a message and exit with code 2."""
    report(message)
    raise SystemExit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD_COMMIT", help="commit, tag or branch to compare with")
    parser.add_argument("--repeats", type=int, default=4, help="repeats of each part; preferably an even number")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="run only these parts")
    parser.add_argument("--json", type=Path, help="also write all times to this file")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {arguments.repeats}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        old = prepare_version("old", export_commit(arguments.old, folder / "old"), folder / "old")
        new = prepare_version("new", copy_working_tree(folder / "new"), folder / "new")
        parts = list(arguments.only)
        for version in (old, new):
            for part in [part for part in parts if part in SCRIPTS and version.find_script(part) is None]:
                report(f"{version.name} ({version.commit}) has no benchmarks/{SCRIPTS[part][0]}; skipping {part}.")
                parts.remove(part)
        times = measure((old, new), parts, arguments.repeats)
    report(f"finished after {(time.monotonic() - start) / 60:.1f} minutes")
    rows = compare(times["old"], times["new"])
    for benchmark in sorted(times["old"][0].keys() ^ times["new"][0].keys()):
        report(f"Only one version has '{benchmark}'. It is not compared.")
    machine = describe_machine()
    print(f"{machine}, one thread; old: {old.commit}, new: {new.commit}; repeats: {arguments.repeats}\n")
    print(format_table(rows))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        results = {
            "machine": machine,
            "old": old.commit,
            "new": new.commit,
            "rows": [asdict(row) for row in rows],
            "seconds": times,
        }
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

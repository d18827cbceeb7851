"""Compare the outputs of two versions of tapfm: a commit and the working tree.

    python tools/compare_versions.py COMMIT                   all outputs must be equal, bit by bit
    python tools/compare_versions.py COMMIT --tolerance       after a change of batching or of a library
    python tools/compare_versions.py COMMIT --tolerance 1e-4  also after a change of training
    python tools/compare_versions.py COMMIT --keep DIR        keep the files of both versions, in DIR/old and DIR/new

Both versions run the commands of `version_scenario.py`, from `tapfm synth` to `tapfm predict`, on the CPU with one
thread, for about a minute each. `version_outputs.py` defines which files and fields are compared or renamed.

Exit code 0: no difference. 1: something differs, or a version failed. 2: invalid input.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from version_items import EQUAL, Tolerance, compare_items, format_verdicts
from version_outputs import collect_items

ROOT = Path(__file__).resolve().parents[1]
# float32 has 7 digits; a different order of summation loses one of them, and training loses more. Statistics are
# computed in float64. A pixel may differ by one level.
ROUNDING = Tolerance(float32=1e-6, statistic=1e-10, pixels=1)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")


class InvalidInputError(Exception):
    """The command line is invalid."""


class VersionFailedError(Exception):
    """A command of the scenario failed."""


def export_commit(repository: Path, commit: str, folder: Path) -> str:
    """Extract the files of a commit into a folder, and return its full hash."""
    found = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
    if found.returncode:
        raise InvalidInputError(
            f"{commit!r} is not a commit of {repository.name}. Pass a hash from `git log --oneline`, or fetch it first."
        )
    full_hash = found.stdout.decode().strip()
    archive = _git(repository, "archive", "--format=tar", full_hash, "src", "pyproject.toml")
    if archive.returncode:
        raise InvalidInputError(f"{commit} has no src/ and pyproject.toml: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as file:
        file.extractall(folder, filter="data")
    return full_hash


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, check=False)


def run_version(name: str, checkout: Path, out: Path) -> float:
    """Run the scenario with one version in a separate process, and return the seconds it took."""
    print(f"\nRunning the {name} version:", flush=True)
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, "1")
    environment |= {"PYTHONPATH": str(checkout / "src"), "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    scenario = [sys.executable, str(ROOT / "tools" / "version_scenario.py"), str(checkout), str(out)]
    started = time.monotonic()
    if subprocess.run(scenario, env=environment, check=False).returncode:
        raise VersionFailedError(f"The {name} version failed; its error message is above.")
    return time.monotonic() - started


def open_output_folder(keep: Path | None) -> contextlib.AbstractContextManager[Path]:
    """Return a context manager with the folder to keep, or with a temporary one."""
    return _temporary_folder() if keep is None else contextlib.nullcontext(keep)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tapfm-versions-") as folder:
        yield Path(folder)


def compare_versions(commit: str, *, tolerance: Tolerance = EQUAL, keep: Path | None = None) -> bool:
    """Run both versions, print the comparison, and return whether nothing differs."""
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise InvalidInputError(f"{keep} is not an empty folder. Pass a new folder to --keep.")
    with open_output_folder(keep and keep.absolute()) as outputs, _temporary_folder() as old:
        full_hash = export_commit(ROOT, commit, old)
        seconds = {
            "old": run_version(f"old ({full_hash[:10]})", old, outputs / "old"),
            "new": run_version("new (working tree)", ROOT, outputs / "new"),
        }
        verdicts = compare_items(collect_items(outputs / "old"), collect_items(outputs / "new"), tolerance)
    print(f"\n{format_verdicts(verdicts)}")
    print(f"The old version ran for {seconds['old']:.0f} s, the new one for {seconds['new']:.0f} s.")
    if keep is not None:
        print(f"The files are in {keep / 'old'} and {keep / 'new'}.")
    return not any(verdict.problem for verdict in verdicts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the outputs of two versions of tapfm.")
    parser.add_argument("commit", help="the old version: a hash, branch or tag")
    parser.add_argument(
        "--tolerance",
        nargs="?",
        type=float,
        const=ROUNDING.float32,
        metavar="FLOAT32",
        help="allow rounding differences: "
        f"{ROUNDING.float32:g} (or FLOAT32) in float32 and {ROUNDING.statistic:g} in statistics, "
        f"relative to the largest value of an array or column; {ROUNDING.pixels:g} level in images",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the files of both versions in this new folder")
    options = parser.parse_args(arguments)
    tolerance = EQUAL if options.tolerance is None else replace(ROUNDING, float32=options.tolerance)
    try:
        same = compare_versions(options.commit, tolerance=tolerance, keep=options.keep)
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return 2
    except VersionFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

"""Compare what two versions of tapfm compute: a commit, and the working tree.

    python tools/compare_versions.py COMMIT                   all outputs must be equal, bit by bit
    python tools/compare_versions.py COMMIT --tolerance       after a change of batching or of a library
    python tools/compare_versions.py COMMIT --tolerance 1e-4  the same where training changes, which adds up
    python tools/compare_versions.py COMMIT --keep DIR        keep the files of both versions, in DIR/old and DIR/new

Both versions run the commands of `version_scenario.py` on the same painted slides, on the CPU with one thread, about a
minute each. `version_outputs.py` says which files and fields are compared, and holds the table of renamed ones.

Exit code 0: no difference. 1: something differs, or a version could not run. 2: bad input.
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
from version_outputs import collect

ROOT = Path(__file__).resolve().parents[1]
# float32 has 7 digits, and a sum in another order loses one; what is trained loses more. Statistics are computed in
# float64. A colour may round to the next level.
ROUNDING = Tolerance(float32=1e-6, statistic=1e-10, pixels=1)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")


class BadInput(Exception):  # noqa: N818 - what was given is wrong; it is no error of the program
    """What was typed cannot be used; the message says what to do."""


class VersionFailed(Exception):  # noqa: N818 - the version failed, not this program
    """A version could not run the scenario."""


def export_commit(repository: Path, commit: str, folder: Path) -> str:
    """Write the files of a commit into a folder; return its full hash."""
    found = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
    if found.returncode:
        raise BadInput(
            f"{commit!r} is not a commit of {repository.name}. Choose one of `git log --oneline`, or fetch it first."
        )
    full = found.stdout.decode().strip()
    archive = _git(repository, "archive", "--format=tar", full, "src", "pyproject.toml")
    if archive.returncode:
        raise BadInput(f"{commit} has no src/ and pyproject.toml: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as file:
        file.extractall(folder, filter="data")
    return full


def _git(repository: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(repository), *words], capture_output=True, check=False)


def run_version(name: str, checkout: Path, out: Path) -> float:
    """Run the scenario with one version in a process of its own; return the seconds it took."""
    print(f"\nRunning the {name} version:", flush=True)
    environment = os.environ | dict.fromkeys(THREADS, "1")
    environment |= {"PYTHONPATH": str(checkout / "src"), "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    scenario = [sys.executable, str(ROOT / "tools" / "version_scenario.py"), str(checkout), str(out)]
    started = time.monotonic()
    if subprocess.run(scenario, env=environment, check=False).returncode:
        raise VersionFailed(f"The {name} version could not run all commands; the output above says why.")
    return time.monotonic() - started


def output_folder(keep: Path | None) -> contextlib.AbstractContextManager[Path]:
    """Return where the outputs go: a folder that stays, or a temporary one."""
    return _temporary_folder() if keep is None else contextlib.nullcontext(keep)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tapfm-versions-") as folder:
        yield Path(folder)


def compare_versions(commit: str, *, tolerance: Tolerance = EQUAL, keep: Path | None = None) -> bool:
    """Run both versions, print the comparison, and return whether nothing differs."""
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise BadInput(f"{keep} is not an empty folder. Give a new one with --keep.")
    with output_folder(keep and keep.absolute()) as outputs, _temporary_folder() as old:
        full = export_commit(ROOT, commit, old)
        seconds = {
            "old": run_version(f"old ({full[:10]})", old, outputs / "old"),
            "new": run_version("new (working tree)", ROOT, outputs / "new"),
        }
        verdicts = compare_items(collect(outputs / "old"), collect(outputs / "new"), tolerance)
    print(f"\n{format_verdicts(verdicts)}")
    print(f"The old version ran for {seconds['old']:.0f} s, the new one for {seconds['new']:.0f} s.")
    if keep is not None:
        print(f"The files are in {keep / 'old'} and {keep / 'new'}.")
    return not any(verdict.problem for verdict in verdicts)


def main(words: Sequence[str] | None = None) -> int:
    """Read the command line and compare."""
    parser = argparse.ArgumentParser(description="Compare what two versions of tapfm compute.")
    parser.add_argument("commit", help="the old version, as git names it: a hash, a branch, a tag")
    parser.add_argument(
        "--tolerance",
        nargs="?",
        type=float,
        const=ROUNDING.float32,
        metavar="FLOAT32",
        help=f"allow rounding: {ROUNDING.float32:g} (or FLOAT32) in float32 and {ROUNDING.statistic:g} in statistics, "
        f"relative to the largest value of an array or column; {ROUNDING.pixels:g} level in pictures",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the files of both versions in this new folder")
    options = parser.parse_args(words)
    tolerance = EQUAL if options.tolerance is None else replace(ROUNDING, float32=options.tolerance)
    try:
        same = compare_versions(options.commit, tolerance=tolerance, keep=options.keep)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    except VersionFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

"""Write the golden files that tests/versions/ compares with.

    python tools/write_golden.py                 all of them, about a minute
    python tools/write_golden.py tiling drawing  some of them

Prints what changed. A golden file whose output changed is not written while its version number (TILING_VERSION and
others) is that of the golden file: increase the number first. `--same-version` is for a change of the inputs in
tests/versions/golden_cases.py, which changes no output of tapfm.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from version_items import Verdict, compare_items, read_golden, write_golden

ROOT = Path(__file__).resolve().parents[1]


def golden_cases() -> Any:
    """Import tests/versions/golden_cases.py with the helpers of the tests."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "versions")]
    return importlib.import_module("golden_cases")


def write(name: str, cases: Any, *, same_version: bool) -> bool:
    """Write one golden file; return False where its version number has to be increased first."""
    case, items, path = cases.CASES[name], cases.make_items(name), cases.FOLDER / name
    changes: list[Verdict] = []
    if path.with_suffix(".json").exists():
        golden, golden_version = read_golden(path)
        changes = [each for each in compare_items(golden, items, cases.GOLDEN) if each.problem]
        # items that are new or gone come from other inputs, not from other output
        changed = [each.name for each in changes if each.name in golden and each.name in items]
        if changed and case.constant and golden_version == case.version and not same_version:
            print(f"{name}: not written. The output changed, and {case.constant} is still {case.version}.")
            print(_listed(changes))
            print(f"  Increase {case.constant} in {case.place} first; or, if only inputs changed: --same-version")
            return False
        if not changes and golden_version == case.version:
            print(f"{name}: unchanged, not written")
            return True
    write_golden(path, items, case.version)
    size = sum(file.stat().st_size for file in path.parent.glob(f"{name}.*"))
    print(f"{name}: written, {len(items):,} items, {size / 1024:,.0f} KiB")
    if changes:
        print(_listed(changes))
    return True


def _listed(changes: list[Verdict]) -> str:
    return "\n".join(f"  {each.name}: {each.problem}" for each in changes)


def main(words: Sequence[str] | None = None) -> int:
    """Read the command line and write."""
    cases = golden_cases()
    parser = argparse.ArgumentParser(description="Write the golden files that tests/versions/ compares with.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(cases.CASES)}; default: all")
    parser.add_argument("--same-version", action="store_true", help="inputs of the tests changed, not output of tapfm")
    options = parser.parse_args(words)
    unknown = [name for name in options.names if name not in cases.CASES]
    if unknown:
        parser.error(f"there is no golden file {unknown[0]!r}; choose from {', '.join(cases.CASES)}")
    names = options.names or list(cases.CASES)
    written = [write(name, cases, same_version=options.same_version) for name in names]
    return 0 if all(written) else 1


if __name__ == "__main__":
    sys.exit(main())

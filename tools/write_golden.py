"""Write the golden files of tests/versions.

    python tools/write_golden.py                 all golden files, about a minute
    python tools/write_golden.py tiling drawing  only these

Prints what changed. If an output changed, its golden file is written only after its version number (TILING_VERSION and
others) was increased. Use `--same-version` if only the inputs in tests/versions/golden_cases.py changed, not the output
of tapfm.
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


def import_golden_cases() -> Any:
    """Import tests/versions/golden_cases.py, which needs the helper modules of the tests."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "versions")]
    return importlib.import_module("golden_cases")


def update_golden_file(name: str, cases: Any, *, same_version: bool) -> bool:
    """Write one golden file. Returns False without writing if its version number has to be increased first."""
    case, items, path = cases.CASES[name], cases.create_items(name), cases.FOLDER / name
    changes: list[Verdict] = []
    if path.with_suffix(".json").exists():
        golden, golden_version = read_golden(path)
        changes = [each for each in compare_items(golden, items, cases.GOLDEN) if each.problem]
        # new and missing items are due to different inputs, not to different output
        changed = [each.name for each in changes if each.name in golden and each.name in items]
        if changed and case.constant and golden_version == case.version and not same_version:
            print(f"{name}: not written. The output changed, and {case.constant} is still {case.version}.")
            print(_format_changes(changes))
            print(
                f"  Increase {case.constant} in {case.place} first; or pass --same-version if only the inputs changed."
            )
            return False
        if not changes and golden_version == case.version:
            print(f"{name}: unchanged, not written")
            return True
    write_golden(path, items, case.version)
    size = sum(file.stat().st_size for file in path.parent.glob(f"{name}.*"))
    print(f"{name}: written, {len(items):,} items, {size / 1024:,.0f} KiB")
    if changes:
        print(_format_changes(changes))
    return True


def _format_changes(changes: list[Verdict]) -> str:
    return "\n".join(f"  {each.name}: {each.problem}" for each in changes)


def main(arguments: Sequence[str] | None = None) -> int:
    cases = import_golden_cases()
    parser = argparse.ArgumentParser(description="Write the golden files of tests/versions.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(cases.CASES)}; default: all")
    parser.add_argument("--same-version", action="store_true", help="only inputs changed, not the output of tapfm")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in cases.CASES]
    if unknown:
        parser.error(f"unknown golden file {unknown[0]!r}; choose from {', '.join(cases.CASES)}")
    names = options.names or list(cases.CASES)
    written = [update_golden_file(name, cases, same_version=options.same_version) for name in names]
    return 0 if all(written) else 1


if __name__ == "__main__":
    sys.exit(main())

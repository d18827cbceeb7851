"""Named outputs of a version of tapfm, compared with those of another version, and stored as golden files.

An item is one line of a comparison, such as the features of all slides. It has parts, such as one array for each slide
or one for each column of a table. A part is compared with the part of the same name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["exact", "float32", "metric", "statistic", "pixels"]
Array = NDArray[Any]

MAX_SHOWN_NAMES = 3  # parts or items in a message
MAX_JSON_VALUES = 200  # of a part; larger parts, unless they are texts, are stored in the .npz file


@dataclass(frozen=True)
class Item:
    """One kind of output: numbers or texts, in named parts."""

    kind: Kind
    parts: Mapping[str, Array]

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(part.size for part in self.parts.values())


Items = dict[str, Item]


@dataclass(frozen=True)
class Tolerance:
    """Largest difference that passes, by kind.

    `float32` and `statistic` are relative to the largest magnitude of the part, because the error of a sum is relative
    to its terms, not to its result. Metrics are computed from float32 values and use the tolerance of float32. Metrics
    and statistics can be 0 except for rounding, such as a difference of two AUCs, so their magnitude counts as at
    least 1. `pixels` is a number of levels (0 to 255). Exact items must be equal.
    """

    float32: float = 0.0
    statistic: float = 0.0
    pixels: float = 0.0

    def allowed_difference(self, kind: Kind, old: Array) -> float:
        """Return the largest difference that passes, for the values of a part."""
        if kind in ("exact", "pixels"):
            return self.pixels if kind == "pixels" else 0.0
        finite = old[np.isfinite(old)]
        scale = float(np.abs(finite).max(initial=0.0 if kind == "float32" else 1.0))
        return (self.statistic if kind == "statistic" else self.float32) * scale


EQUAL = Tolerance()


@dataclass(frozen=True)
class Verdict:
    """Result for one item: an empty `problem` means that it passed."""

    name: str
    kind: str
    count: int  # of values
    largest: float | None  # difference between numbers; None for texts
    problem: str = ""


def compare_items(old: Items, new: Items, tolerance: Tolerance = EQUAL) -> list[Verdict]:
    """Compare two versions item by item. An item that only one version has is a difference."""
    return [compare_item(name, old.get(name), new.get(name), tolerance) for name in sorted(old.keys() | new.keys())]


def compare_item(name: str, old: Item | None, new: Item | None, tolerance: Tolerance = EQUAL) -> Verdict:
    """Compare one item. None means that a version does not have it."""
    if old is None or new is None:
        only = new or old
        assert only is not None
        return Verdict(name, only.kind, only.count, None, f"only in the {'new' if old is None else 'old'} version")
    if old.kind != new.kind:
        return Verdict(name, new.kind, new.count, None, f"was of kind {old.kind}")
    problems, largest = list(_differing_names(old, new)), None
    for part in [each for each in old.parts if each in new.parts]:
        difference, problem = _compare_part(old.kind, old.parts[part], new.parts[part], tolerance)
        if difference is not None:
            largest = max(largest or 0.0, difference)
        if problem:
            problems.append(f"{part}: {problem}" if part else problem)
    more = f"; and {len(problems) - MAX_SHOWN_NAMES:,} more" if len(problems) > MAX_SHOWN_NAMES else ""
    return Verdict(name, old.kind, new.count, largest, "; ".join(problems[:MAX_SHOWN_NAMES]) + more)


def _differing_names(old: Item, new: Item) -> Iterator[str]:
    for version, own, other in (("old", old, new), ("new", new, old)):
        names = [name for name in own.parts if name not in other.parts]
        if names:
            more = ", ..." if len(names) > MAX_SHOWN_NAMES else ""
            yield f"only in the {version} version: {', '.join(names[:MAX_SHOWN_NAMES])}{more}"


def _compare_part(kind: Kind, old: Array, new: Array, tolerance: Tolerance) -> tuple[float | None, str]:
    """Return the largest difference (None for texts) and a description of the problem, if any."""
    if old.shape != new.shape:
        return None, f"the shape is {new.shape} and was {old.shape}"
    if old.dtype == new.dtype and np.array_equal(old, new):
        return (None if old.dtype.kind == "U" else 0.0), ""
    if old.dtype.kind == "U" or new.dtype.kind == "U":
        return None, _first_difference(old, new, np.asarray(old != new))
    before, after = old.astype(np.float64), new.astype(np.float64)
    if kind == "exact":  # integers beyond 2**53 are not exact as float64
        return float(np.abs(after - before).max(initial=0.0)), _first_difference(old, new, np.asarray(old != new))
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(after - before))
    difference[np.isnan(difference)] = np.inf  # a number instead of NaN, or the reverse
    problem = _first_difference(old, new, ~(difference <= tolerance.allowed_difference(kind, before)))
    return float(difference.max(initial=0.0)), problem


def _first_difference(old: Array, new: Array, differs: Array) -> str:
    if not differs.any():
        return ""
    index = tuple(int(each) for each in np.argwhere(differs)[0]) if differs.ndim else ()
    where = f" at {list(index)}" if differs.size > 1 else ""
    return f"{int(differs.sum()):,} of {differs.size:,} differ, first{where}: {old[index]!s} became {new[index]!s}"


def format_verdicts(verdicts: list[Verdict]) -> str:
    """Return a table of the verdicts, followed by a summary."""
    name_width = max((len(each.name) for each in verdicts), default=0)
    lines = [f"{'item':{name_width}}  {'kind':9}  {'values':>9}  {'largest':>9}  verdict"]
    for each in verdicts:
        largest = "-" if each.largest is None else f"{each.largest:.2g}"
        verdict = f"DIFFERS: {each.problem}" if each.problem else "ok"
        lines.append(f"{each.name:{name_width}}  {each.kind:9}  {each.count:9,}  {largest:>9}  {verdict}")
    failed = sum(bool(each.problem) for each in verdicts)
    values = sum(each.count for each in verdicts)
    summary = f"{len(verdicts):,} items with {values:,} values: "
    return "\n".join([*lines, "", summary + (f"{failed:,} items differ." if failed else "no difference.")])


# --- golden files


def write_golden(path: Path, items: Items, version: int | None) -> None:
    """Write items to PATH.json, and their larger arrays to PATH.npz. The same items give the same bytes."""
    described: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    for name, item in sorted(items.items()):
        parts: dict[str, Any] = {}
        for part, values in item.parts.items():
            if values.dtype.kind == "U" or values.size <= MAX_JSON_VALUES:
                parts[part] = {"dtype": values.dtype.str, "shape": values.shape, "values": _as_list(values)}
            else:
                arrays[f"{len(arrays)}"] = values
                parts[part] = {"array": f"{len(arrays) - 1}"}
        described[name] = {"kind": item.kind, "parts": parts}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"version": version, "items": described}, indent=0, sort_keys=True, ensure_ascii=False)
    path.with_suffix(".json").write_text(_join_list_lines(text) + "\n", "utf-8")
    path.with_suffix(".npz").unlink(missing_ok=True)
    if arrays:
        np.savez_compressed(path.with_suffix(".npz"), **arrays)  # type: ignore[arg-type]


def _as_list(values: Array) -> list[Any]:
    return [None if isinstance(each, float) and np.isnan(each) else each for each in values.reshape(-1).tolist()]


def _join_list_lines(text: str) -> str:
    """Put each list of values on one line, so that a changed part is one changed line."""
    lines, depth = [""], 0
    for line in text.split("\n"):
        lines[-1] += line
        depth += line.endswith("[") - (line.rstrip(",") == "]")
        if not depth:
            lines.append("")
    return "\n".join(lines).rstrip("\n")


def read_golden(path: Path) -> tuple[Items, int | None]:
    """Read the items of a golden file, and the version number of the code that wrote it."""
    written = json.loads(path.with_suffix(".json").read_text("utf-8"))
    arrays: Mapping[str, Array] = {}
    if path.with_suffix(".npz").exists():
        with np.load(path.with_suffix(".npz")) as file:
            arrays = dict(file)
    items = {}
    for name, item in written["items"].items():
        parts = {part: _as_array(each, arrays) for part, each in item["parts"].items()}
        items[name] = Item(item["kind"], parts)
    return items, written["version"]


def _as_array(described: Mapping[str, Any], arrays: Mapping[str, Array]) -> Array:
    if "array" in described:
        return arrays[described["array"]]
    dtype = np.dtype(described["dtype"])
    values = [np.nan if each is None else each for each in described["values"]] if dtype.kind == "f" else None
    return np.array(described["values"] if values is None else values, dtype).reshape(described["shape"])

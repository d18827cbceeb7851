"""What stands in a file: names and types, read from a real one; nothing of its values."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from pyarrow import parquet
from reference_lab import TARGET
from safetensors import safe_open

from tapfm.runs.checkpoint import DESCRIPTION


@dataclass(frozen=True)
class Entry:
    """A column, key, dataset or attribute; `group` says of what where a file has several kinds."""

    name: str
    kind: str = ""
    group: str = ""


def entries_of(path: Path, known: Collection[str]) -> list[Entry]:
    """List what a file holds; of nested keys, those below a `known` one are part of it."""
    entries = list(READERS[path.suffix](path, known))
    return [Entry(each.name.replace(TARGET, "TARGET"), each.kind, each.group) for each in entries]


def columns(path: Path, _: Collection[str]) -> Iterator[Entry]:
    """Read the first line of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        yield from map(Entry, next(csv.reader(file)))


def keys(path: Path, known: Collection[str]) -> Iterator[Entry]:
    """Read the keys of a JSON file, or of the first line of one with a line for each."""
    text = path.read_text("utf-8")
    value = json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)
    yield from map(Entry, nested(value, known))


def nested(value: Any, known: Collection[str], above: str = "") -> Iterator[str]:
    """Name keys with those above them, `[]` for each of a list; what is below a known key is part of it."""
    place = above.replace(TARGET, "TARGET")
    below = any(name.startswith((f"{place}.", f"{place}[]")) for name in known)
    if (place in known and not below) or not isinstance(value, dict | list):
        yield above
    elif isinstance(value, list):
        yield from dict.fromkeys(name for each in value for name in nested(each, known, f"{above}[]"))
    else:
        for key, inside in value.items():
            yield from nested(inside, known, f"{above}.{key}" if above else key)


def datasets(path: Path, _: Collection[str]) -> Iterator[Entry]:
    """Read the datasets of an HDF5 file, and what each says of itself."""
    with h5py.File(path, "r") as file:
        tiles = len(file["coords"])
        for name, dataset in file.items():
            dims = ["tiles" if dim == tiles else str(dim) if dim == 2 else "D" for dim in dataset.shape]
            yield Entry(name, f"{dataset.dtype}, {' x '.join(dims)}", "Datasets")
        for name, dataset in file.items():
            for key, value in dataset.attrs.items():
                yield Entry(key, attribute_kind(value), f"Attributes of `{name}`")


def attribute_kind(value: Any) -> str:
    """Name the type of an attribute; whether a number is a whole one depends on the slide."""
    if isinstance(value, str):
        return "text"
    return "number" if np.ndim(value) == 0 else f"{np.size(value)} numbers"


def tile_columns(path: Path, _: Collection[str]) -> Iterator[Entry]:
    """Read the schema of a Parquet file."""
    for field in parquet.read_schema(path):
        yield Entry(field.name, str(field.type))


def tensors(path: Path, known: Collection[str]) -> Iterator[Entry]:
    """Read the names of tensors up to the first slash, and the description in the header."""
    with safe_open(path, framework="numpy") as file:
        groups = dict.fromkeys(name.partition("/")[0] + "/" for name in file.keys() if "/" in name)  # noqa: SIM118
        about = file.metadata()
    for name in groups or ["*"]:
        yield Entry(name, "tensors", "Tensors")
    text = about[DESCRIPTION]
    where = f"Header, JSON under `{DESCRIPTION}`" if text.startswith("{") else "Header"
    found = nested(json.loads(text), known) if text.startswith("{") else sorted(about)
    yield from (Entry(name, "", where) for name in found)


READERS = {
    ".csv": columns,
    ".geojson": keys,
    ".h5": datasets,
    ".json": keys,
    ".jsonl": keys,
    ".parquet": tile_columns,
    ".safetensors": tensors,
}

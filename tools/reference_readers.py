"""Read the names and types of the columns, keys, datasets or attributes in a file."""

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
from reference_samples import TARGET
from safetensors import safe_open

from tapfm.runs.checkpoint import METADATA_KEY


@dataclass(frozen=True)
class Entry:
    """A column, key, dataset or attribute. `group` is a heading if a file has several kinds of entries."""

    name: str
    kind: str = ""
    group: str = ""


def read_entries(path: Path, known: Collection[str]) -> list[Entry]:
    """Return the entries of a file. Nested keys below a key in `known` are not listed separately."""
    entries = list(_READERS[path.suffix](path, known))
    return [Entry(each.name.replace(TARGET, "TARGET"), each.kind, each.group) for each in entries]


def _csv_columns(path: Path, _: Collection[str]) -> Iterator[Entry]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from map(Entry, next(csv.reader(file)))


def _json_keys(path: Path, known: Collection[str]) -> Iterator[Entry]:
    """Yield the keys of a JSON file, or of the first line of a JSON Lines file."""
    text = path.read_text("utf-8")
    value = json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)
    yield from map(Entry, _nested_keys(value, known))


def _nested_keys(value: Any, known: Collection[str], above: str = "") -> Iterator[str]:
    """Yield dotted keys, with `[]` for list items. Keys below a known key are skipped."""
    prefix = above.replace(TARGET, "TARGET")
    below = any(name.startswith((f"{prefix}.", f"{prefix}[]")) for name in known)
    if (prefix in known and not below) or not isinstance(value, dict | list):
        yield above
    elif isinstance(value, list):
        yield from dict.fromkeys(name for each in value for name in _nested_keys(each, known, f"{above}[]"))
    else:
        for key, inside in value.items():
            yield from _nested_keys(inside, known, f"{above}.{key}" if above else key)


def _hdf5_entries(path: Path, _: Collection[str]) -> Iterator[Entry]:
    """Yield the datasets of an HDF5 file, and the attributes of each."""
    with h5py.File(path, "r") as file:
        tiles = len(file["coords"])
        for name, dataset in file.items():
            dims = ["tiles" if dim == tiles else str(dim) if dim == 2 else "D" for dim in dataset.shape]
            yield Entry(name, f"{dataset.dtype}, {' x '.join(dims)}", "Datasets")
        for name, dataset in file.items():
            for key, value in dataset.attrs.items():
                yield Entry(key, _attribute_type(value), f"Attributes of `{name}`")


def _attribute_type(value: Any) -> str:
    # "number" for integers and floats: the type can depend on the slide
    if isinstance(value, str):
        return "text"
    return "number" if np.ndim(value) == 0 else f"{np.size(value)} numbers"


def _parquet_columns(path: Path, _: Collection[str]) -> Iterator[Entry]:
    for field in parquet.read_schema(path):
        yield Entry(field.name, str(field.type))


def _safetensors_entries(path: Path, known: Collection[str]) -> Iterator[Entry]:
    """Yield the names of tensors up to the first slash, and the keys of the metadata in the header."""
    with safe_open(path, framework="numpy") as file:
        groups = dict.fromkeys(name.partition("/")[0] + "/" for name in file.keys() if "/" in name)  # noqa: SIM118
        header = file.metadata()
    for name in groups or ["*"]:
        yield Entry(name, "tensors", "Tensors")
    text = header[METADATA_KEY]
    group = f"Header, JSON under `{METADATA_KEY}`" if text.startswith("{") else "Header"
    names = _nested_keys(json.loads(text), known) if text.startswith("{") else sorted(header)
    yield from (Entry(name, "", group) for name in names)


_READERS = {
    ".csv": _csv_columns,
    ".geojson": _json_keys,
    ".h5": _hdf5_entries,
    ".json": _json_keys,
    ".jsonl": _json_keys,
    ".parquet": _parquet_columns,
    ".safetensors": _safetensors_entries,
}

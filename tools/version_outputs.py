"""Read the output files of tapfm as items to compare. Does not import tapfm.

Files of the same kind for several slides are one item: `features/ID.h5`. A JSON or CSV file has up to three items:
texts and integers, which must be equal; other numbers; and messages. The tables below define what is renamed or
excluded.
"""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.parquet
import tifffile
from PIL import Image
from safetensors.numpy import load_file
from version_items import Array, Item, Items, Kind

# Names that changed between versions, from old to new. Both versions are read with the new names.
# Add a line when a file, a column or a key is renamed:
#     RENAMED_FILES: ("evaluations/*/metrics.csv", "metrics.csv", "results.csv")     files, old text, new text
#     RENAMED_FIELDS: ("predictions/*/predictions.csv", "call", "predicted_class")   files (new), old field, new field
# A field is a column of a table, or the full path of a key: `models.model.all.EGFR.auc`. `*.auc` is any path that ends
# with `.auc`.
RENAMED_FILES: tuple[tuple[str, str, str], ...] = (("comparisons/*", "left_out.csv", "excluded.csv"),)
RENAMED_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("*.toml", "augmentation.quarter_turns", "augmentation.rotate_90"),
    ("*.toml", "adaptation.cosine", "adaptation.cosine_loss"),
    ("*excluded.csv", "method", "model"),
    ("*.toml", "machine.read_ahead_gib", "machine.prefetch_gib"),
    ("*.toml", "machine.save_minutes", "machine.checkpoint_minutes"),
    ("*history.jsonl", "loss_regular", "loss_cosine"),
    ("*history.jsonl", "waiting_share", "data_wait_fraction"),
    ("*failures.csv", "what_to_do", "hint"),
    ("*failures.csv", "what", "problem"),
    ("*tapfm.json", "encoder.began_with_sha256", "encoder.base_weights_sha256"),
    ("*tapfm.json", "encoder.features_made_by", "encoder.features_source"),
    ("*environment.json", "[].features_made_by", "[].features_source"),
    ("*.png", "text.tapfm.slide_in_picture_px[]", "text.tapfm.slide_in_image_px[]"),
    ("*.tif", "description.made_by", "description.created_by"),
    *(("*metrics.csv", old, new) for old, new in (("low", "ci_low"), ("high", "ci_high"), ("why", "reason"))),
    *(("*comparison.csv", old, new) for old, new in (("low", "ci_low"), ("high", "ci_high"), ("why", "reason"))),
    ("*comparison.json", "label_conflicts[]", "partial_labels[]"),
    ("*.json", "*.why", "*.reason"),
    ("*.h5", "coords.tapfm_summary.what_to_do", "coords.tapfm_summary.hint"),
    ("inspected.json", "what_to_do", "hint"),
)

# Files that are not compared: pages, figures, internal files of tapfm, the environment of a run, and files that the
# scenario itself writes.
EXCLUDED_FILES = (
    *(".*", "*/.*", "*.html", "*.md", "*.txt", "*/tensorboard/*", "*/environment.json", "*/contact-sheet.jpg"),
    *("*/curves.png", "*/roc.png", "*/pr.png", "*/reliability.png", "*/scores.png", "*/differences.png"),
    *("inputs/*", "ensemble/*"),
)
# Fields that are not compared, as FILE:FIELD: paths, times, versions, and digests of the inputs of a result.
EXCLUDED_FIELDS = (
    *(
        "*:path",
        "*:*.path",
        "*:[[]].path",
        "*:*savetodir",
        "*:*save_path",
        "*.toml:cohort.table",
        "*.toml:tiles.folder",
    ),
    *("*.toml:tiles.features", "*/prediction.json:model", "*/evaluation.json:model", "*:evaluation.model"),
    *("*:files.*", "*:*table"),
    *("*:seconds", "*:*.seconds", "*:*tiles_per_second", "*:*data_wait_fraction", "*:*peak_memory_gib"),
    *("*:tapfm", "*:*.tapfm", "*:text.Software"),
    *("*:key", "*:*.key", "*:digest", "*:run", "*:*.run", "*:*sha256", "*:*fingerprint", "*:*features_source"),
)
# Metrics are computed from predictions in float32; statistics in float64, from inputs that do not depend on an encoder.
METRICS = ("evaluations/*/metrics.*", "comparisons/runs/*")
STATISTICS = ("comparisons/tables/*", "evaluations/*/colours.csv", "synthetic/truth/*", "*/summary.csv")
# Fields that contain sentences, as FILE:FIELD. They are in a separate item `FILE messages`: different wording is not a
# different result.
MESSAGES = (
    *("*:why", "*:*.why", "*:*.why_*", "*:reason", "*:*.reason", "*:warnings", "*:*.warnings", "*:*hint"),
    *("*:*notes*", "*/metrics.json:baseline", "*:*chosen_on", "*/prediction.json:calls.by"),
    *("*.png:text.*.unit", "*.tif:description.unit", "*.tif:description.title", "*.tif:description.created_by"),
)
# Files that match one of these patterns share an item, which is named after the pattern.
GROUPED = ("heatmap-*.png", "heatmap-*.tif", "gallery-*.png")
SLIDE_ID = re.compile(r"\b[SX]\d{3}(?!\d)")  # slide ids of `tapfm synth`

ReduceImage = Callable[[Array], Array]
Leaves = dict[str, list[Any]]  # values of each field


def collect_items(
    folder: Path, reduce_image: ReduceImage = lambda pixels: pixels, exclude: tuple[str, ...] = ()
) -> Items:
    """Read the files in a folder, except those that match `EXCLUDED_FILES` or `exclude`.

    `reduce_image` is applied to images.
    """
    leaves: dict[str, Leaves] = {}
    arrays: dict[tuple[str, Kind], dict[str, Array]] = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        file = _current_name(path.relative_to(folder).as_posix())
        if any(fnmatch(file, pattern) for pattern in (*EXCLUDED_FILES, *exclude)):
            continue
        name, slide_id = _item_name(file)
        for field, values in _read_fields(path):
            field = _current_field(file, field)
            if field == "columns":
                values = [_current_field(file, column) for column in values]
            if any(fnmatch(f"{file}:{field}", pattern) for pattern in EXCLUDED_FIELDS):
                continue
            is_message = any(fnmatch(f"{file}:{field}", pattern) for pattern in MESSAGES)
            fields = leaves.setdefault(f"{name} messages" if is_message else name, {})
            fields.setdefault(field, []).extend(values)
        for array_name, array in _read_arrays(path):
            item_name = f"{name} {array_name}".strip()
            arrays.setdefault((item_name, _array_kind(name, array)), {})[slide_id] = array
        for part, tensor in _read_tensors(path):
            kind = _array_kind(name, tensor)
            item_name = f"{name} weights" if kind == "float32" else f"{name} states"
            arrays.setdefault((item_name, kind), {})[part] = tensor
        if path.suffix in (".png", ".tif", ".svs"):
            part = f"{slide_id} {path.name}".strip() if name.endswith(GROUPED) else slide_id
            for level, pixels in enumerate(_read_image(path)):
                label = f"{part} level {level}" if level else part
                arrays.setdefault((f"{name} pixels", "pixels"), {})[label] = reduce_image(pixels)
    items = {name: Item(kind, parts) for (name, kind), parts in arrays.items()}
    for name, fields in leaves.items():
        items |= dict(_field_items(name, fields))
    return items


def _current_name(file: str) -> str:
    for pattern, old, new in RENAMED_FILES:
        if fnmatch(file, pattern):
            file = file.replace(old, new)
    return file


def _current_field(file: str, field: str) -> str:
    for pattern, old, new in RENAMED_FIELDS:
        if not fnmatch(file, pattern):
            continue
        if field == old:
            return new
        if old.startswith("*") and field.endswith(old[1:]):
            return field.removesuffix(old[1:]) + new[1:]
    return field


def _item_name(file: str) -> tuple[str, str]:
    """Return the name of a file's item, and the slide id of the file or an empty string."""
    found = SLIDE_ID.search(file)
    name = SLIDE_ID.sub("ID", file)
    parent, _, last = name.rpartition("/")
    grouped = next((pattern for pattern in GROUPED if fnmatch(last, pattern)), last)
    return f"{parent}/{grouped}".lstrip("/"), found[0] if found else ""


def _array_kind(name: str, array: Array) -> Kind:
    return _number_kind(name) if array.dtype.kind == "f" else "exact"


def _number_kind(name: str) -> Kind:
    if any(fnmatch(name, pattern) for pattern in METRICS):
        return "metric"
    return "statistic" if any(fnmatch(name, pattern) for pattern in STATISTICS) else "float32"


def _field_items(name: str, fields: Leaves) -> Iterator[tuple[str, Item]]:
    """Yield an item of the exact fields of a file (texts, integers), and an item of its other numbers."""
    exact: dict[str, Array] = {}
    numbers: dict[str, Array] = {}
    for field, values in sorted(fields.items()):
        if values and all(type(each) is int for each in values):
            exact[field] = np.array(values, np.int64)
        elif any(type(each) is float for each in values) and all(_is_number(each) for each in values):
            numbers[field] = np.array([np.nan if each is None else each for each in values], np.float64)
        else:
            exact[field] = np.array([each if isinstance(each, str) else json.dumps(each) for each in values], np.str_)
    if exact:
        yield name, Item("exact", exact)
    if numbers:
        yield f"{name} numbers", Item(_number_kind(name), numbers)


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (int, float)


# --- readers of the file formats


def _read_fields(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """Yield the fields of tables and nested files with their values. None is an empty cell."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        columns = list(rows[0]) if rows else path.read_text("utf-8").strip().split(",")
        yield "columns", columns
        for column in columns:
            yield column, _convert_cells([row[column] for row in rows])
    elif path.suffix in (".json", ".geojson"):
        yield from _flatten(json.loads(path.read_text("utf-8"))).items()
    elif path.suffix == ".jsonl":
        yield from _flatten([json.loads(line) for line in path.read_text("utf-8").splitlines()]).items()
    elif path.suffix == ".toml":
        yield from _flatten(tomllib.loads(path.read_text("utf-8"))).items()
    elif path.suffix == ".h5":
        with h5py.File(path) as stored:
            for dataset in stored.values():
                for name, value in sorted(dataset.attrs.items()):
                    yield from _flatten(_parse_attribute(value), f"{dataset.name[1:]}.{name}").items()
    elif path.suffix == ".tif":
        with tifffile.TiffFile(path) as tiff:
            yield from _flatten(_parse_attribute(tiff.pages[0].description), "description").items()
    elif path.suffix == ".png":
        with Image.open(path) as image:
            for key, text in getattr(image, "text", {}).items():
                yield from _flatten(_parse_attribute(text), f"text.{key}").items()


def _convert_cells(cells: list[str]) -> list[Any]:
    """Convert a column to numbers if all of its non-empty cells are numbers."""
    for convert in (int, float):
        try:
            numbers = [convert(cell) if cell else None for cell in cells]
        except ValueError:
            continue
        # integers with empty cells become floats; a column of empty cells stays text
        if any(number is not None for number in numbers):
            return numbers if convert is float or None not in numbers else [each and float(each) for each in numbers]
    return list(cells)


def _parse_attribute(value: Any) -> Any:
    """Convert an attribute of an HDF5 file or an image. JSON objects are parsed."""
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


def _flatten(node: Any, field: str = "") -> Leaves:
    """Return the leaves of nested data by the path of their keys, with `[]` for list elements."""
    found: Leaves = {}
    if isinstance(node, dict):
        for key, value in node.items():
            for name, values in _flatten(value, f"{field}.{key}" if field else key).items():
                found.setdefault(name, []).extend(values)
    elif isinstance(node, list):
        for value in node:
            below = field if not field or field.endswith("[]") else f"{field}[]"
            for name, values in _flatten(value, below).items():
                found.setdefault(name, []).extend(values)
    else:
        found[field] = [node]
    return found


def _read_arrays(path: Path) -> Iterator[tuple[str, Array]]:
    """Yield the datasets of HDF5 files and the columns of Parquet files."""
    if path.suffix == ".h5":
        with h5py.File(path) as stored:
            for name, dataset in stored.items():
                yield name, np.asarray(dataset)
    elif path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
        for name in table.column_names:
            yield name, table[name].to_numpy()


def _read_tensors(path: Path) -> Iterator[tuple[str, Array]]:
    if path.suffix == ".safetensors":
        yield from sorted(load_file(path).items())


def _read_image(path: Path) -> Iterator[Array]:
    """Yield the pixels of an image; for a TIFF, of each level of its pyramid."""
    if path.suffix == ".png":
        with Image.open(path) as image:
            yield np.asarray(image)
        return
    with tifffile.TiffFile(path) as file:
        for level in file.series[0].levels:
            yield np.asarray(level.asarray())

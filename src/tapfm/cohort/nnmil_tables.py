"""Read the JSON files of nnMIL: dataset_plan.json with slides and splits, and dataset.json beside dataset.csv."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapfm.cohort.table_text import TableRows, decode_text
from tapfm.errors import CohortError

_HINT = (
    "Pass dataset_plan.json or dataset.json of nnMIL, or a table (CSV, TSV, .xlsx). Supported JSON: an object with "
    '"data_splits", or with "task_type" and a file dataset.csv in the same folder.'
)
_SINGLE_SPLIT = "official_split"  # nnMIL's name of a split without folds
_MAX_CLASSES_NAMED = 10


def read_nnmil_document(source: Path, data: bytes, encoding: str | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the content of a JSON file of nnMIL, and notes about its encoding."""
    text, notes = decode_text(source, data, encoding)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CohortError(f"{source} is not valid JSON ({error}).", hint=_HINT) from error
    if not isinstance(document, dict) or not ("data_splits" in document or "task_type" in document):
        raise CohortError(f"{source} is not a JSON file of nnMIL.", hint=_HINT)
    return document, notes


def find_nnmil_csv(source: Path, document: Mapping[str, Any]) -> Path | None:
    """Return the table that dataset.json describes; None if the slides are in the JSON file."""
    if "data_splits" in document:
        return None
    beside = source.with_name("dataset.csv")  # the only table that nnMIL reads
    recorded = Path(str(document.get("clinical_dir", "")))
    found = next((path for path in (beside, source.parent / recorded) if path.is_file()), None)
    if found is None:
        raise CohortError(f"{beside} does not exist. It contains the slides of {source}.", hint=_HINT)
    return found


def class_names(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of each class by its number in the column `label`; empty if there are no unique names."""
    labels = document.get("labels")
    if document.get("task_type") != "classification" or not isinstance(labels, dict):
        return {}
    names = {str(number).strip(): _cell_text(name).strip() for number, name in labels.items()}
    return names if len(set(names.values())) == len(names) and all(names.values()) else {}


def describe_classes(source: Path, names: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note with the names of the classes, if they differ from their numbers."""
    if all(number == name for number, name in names.items()):
        return ()
    listed = [f"{number} = {name}" for number, name in names.items()]
    more = f", ... ({len(listed)} classes)" if len(listed) > _MAX_CLASSES_NAMED else ""
    return (f"Classes of the column 'label', from {source}: {', '.join(listed[:_MAX_CLASSES_NAMED])}{more}.",)


def read_plan_rows(source: Path, document: Mapping[str, Any]) -> TableRows:
    """Return the slides of dataset_plan.json, with a column `split`, or columns `fold_0`, `fold_1`, ..."""
    slides: dict[str, dict[str, str]] = {}
    numbers: dict[str, int] = {}
    problems: list[tuple[int, str]] = []
    split_columns = []
    for plan_split, parts in _items(source, document["data_splits"], "data_splits"):
        column = "split" if plan_split == _SINGLE_SPLIT else plan_split
        split_columns.append(column)
        for part, content in _items(source, parts, f"data_splits / {plan_split}"):
            for cells in _slide_cells(source, content, f"data_splits / {plan_split} / {part}"):
                slide_id = cells["slide_id"]
                number = numbers.setdefault(slide_id, len(numbers) + 1)
                known = slides.setdefault(slide_id, dict(cells))
                if other := known.get(column):
                    problems.append((number, f"slide '{slide_id}' is listed in '{other}' and '{part}' of {plan_split}"))
                for name, text in cells.items():
                    if known.setdefault(name, text) != text:
                        problems.append((number, f"slide '{slide_id}' has different values of {name} in {plan_split}"))
                known[column] = part
    names = dict.fromkeys(name for cells in slides.values() for name in cells if name not in split_columns)
    header = [*names, *split_columns]
    rows = [(numbers[slide_id], [cells.get(name, "") for name in header]) for slide_id, cells in slides.items()]
    return TableRows([(0, header), *rows], problems=tuple(problems))


def _items(source: Path, value: Any, where: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        raise CohortError(f"{source}: {where} is not a JSON object with splits.", hint=_HINT)
    return list(value.items())


def _slide_cells(source: Path, content: Any, where: str) -> list[dict[str, str]]:
    """Return the cells of each slide of a split."""
    entries = content.get("slide_info") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise CohortError(f"{source}: {where} has no list 'slide_info'.", hint=_HINT)
    slides = []
    for entry in entries:
        cells = {str(name): _cell_text(value) for name, value in entry.items()} if isinstance(entry, dict) else {}
        if not cells.get("slide_id"):
            raise CohortError(f"{source}: an entry of {where} / slide_info has no slide_id.", hint=_HINT)
        slides.append(cells)
    return slides


def _cell_text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return f"{value:.15g}"
    return str(value).strip()

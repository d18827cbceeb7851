"""Write splits in the layouts of other tools, as they read them: CLAM, Patho-Bench, nnMIL and STAMP.

These tools train on one target, and read their tables with pandas. A slide without a label of a target is not in the
files of the target.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tapfm.cohort.table_text import list_some
from tapfm.errors import CohortError

_TOOLS = {"tapfm": "tapfm", "clam": "CLAM", "patho-bench": "Patho-Bench", "nnmil": "nnMIL", "stamp": "STAMP"}
LAYOUTS = tuple(_TOOLS)
_SPLITS = ("train", "val", "test")
# Texts that pandas reads as a missing value
_PANDAS_MISSING = frozenset(
    (
        *("#N/A", "#N/A N/A", "#NA", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null", "-NaN", "-nan"),
        *("-1.#IND", "-1.#QNAN", "1.#IND", "1.#QNAN"),
    )
)


@dataclass(frozen=True)
class SplitSlide:
    """A slide with its labels and splits, as text. An empty label is unknown; with an empty split it is excluded."""

    slide_id: str
    path: str  # as in the table to write; empty if unknown
    patient_id: str
    labels: Mapping[str, str]  # by target
    splits: Mapping[str, str]  # train, val or test, by column: `split`, or `fold_0`, `fold_1`, ...


def format_split_layout(
    layout: str,
    slides: Sequence[SplitSlide],
    targets: Sequence[str],
    file_stem: str,
    classes: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, bytes]:
    """Return the files of a layout, by their path below the output folder.

    file_stem: name of the cohort. classes: by target the order of its classes, for layouts that number them; by default
    sorted. Raises CohortError if the tool could not read the files.
    """
    columns = list(dict.fromkeys(column for slide in slides for column in slide.splits))
    if layout == "tapfm":
        return _format_tapfm(slides, targets, columns, file_stem)
    if not targets:
        raise CohortError(
            f"The layout {layout} needs labels, but no target was chosen.", hint="Name the label column: --target NAME"
        )
    _check_text(layout, "slide_id", [slide.slide_id for slide in slides])
    _check_text(layout, "patient_id", [slide.patient_id for slide in slides])
    if layout == "stamp":
        return _format_stamp(slides, targets, columns)
    files: dict[str, bytes] = {}
    for target, folder in zip(targets, _folder_names(targets), strict=True):
        labelled = [slide for slide in slides if slide.labels.get(target)]
        given = classes.get(target) if classes else None
        files |= _FORMATTERS[layout](_Task(target, folder, file_stem, labelled, columns, given))
    return files


@dataclass(frozen=True)
class _Task:
    """The slides with a label of one target."""

    target: str
    folder: str
    cohort: str
    slides: Sequence[SplitSlide]
    columns: Sequence[str]  # of splits
    classes: Sequence[str] | None

    @property
    def labels(self) -> list[str]:
        return [slide.labels[self.target] for slide in self.slides]

    @property
    def class_names(self) -> list[str]:
        """The names of the classes 0, 1, ... The labels 0 and 1 are their own names, also if one of them is missing."""
        if self.classes:
            return list(self.classes)
        found = set(self.labels)
        if found <= {"0", "1"}:
            return ["0", "1"]
        return sorted(found, key=int) if all(name.isdecimal() for name in found) else sorted(found)


def _format_tapfm(
    slides: Sequence[SplitSlide], targets: Sequence[str], columns: Sequence[str], file_stem: str
) -> dict[str, bytes]:
    rows = [
        [slide.slide_id, slide.path, slide.patient_id]
        + [slide.labels.get(target, "") for target in targets]
        + [slide.splits.get(column, "") for column in columns]
        for slide in slides
    ]
    return {f"{file_stem}.csv": _format_table(["slide_id", "path", "patient_id", *targets, *columns], rows)}


def _format_clam(task: _Task) -> dict[str, bytes]:
    """Return CLAM's table of slides, and for each split the lists of slides (and the same as True and False)."""
    ids = [slide.slide_id for slide in task.slides]
    _check_not_numbers("clam", "slide_id", ids)
    _check_text("clam", f"label of {task.target}", task.labels)
    rows = zip([slide.patient_id for slide in task.slides], ids, task.labels, strict=True)
    files = {f"dataset_csv/{task.folder}.csv": _format_table(["case_id", "slide_id", "label"], rows)}
    for column in task.columns:
        number = 0 if column == "split" else int(column.removeprefix("fold_"))
        lists = [[slide.slide_id for slide in task.slides if slide.splits.get(column) == name] for name in _SPLITS]
        ragged = [
            [str(row), *(each[row] if row < len(each) else "" for each in lists)] for row in range(max(map(len, lists)))
        ]
        flags = [
            [slide_id, *(str(name == other) for other in _SPLITS)]
            for name, each in zip(_SPLITS, lists, strict=True)
            for slide_id in each
        ]
        path = f"splits/{task.folder}_100/splits_{number}"  # 100: percent of the slides that are used
        files |= {f"{path}.csv": _format_table(["", *_SPLITS], ragged)}
        files |= {f"{path}_bool.csv": _format_table(["", *_SPLITS], flags)}
    return files


def _format_patho_bench(task: _Task) -> dict[str, bytes]:
    """Return the split table and the configuration of a task of Patho-Bench. A single split is fold 0."""
    names = task.class_names
    folds = {column: "fold_0" if column == "split" else column for column in task.columns}
    rows = [
        [slide.patient_id, slide.slide_id, str(names.index(label)), *(slide.splits.get(each, "") for each in folds)]
        for slide, label in zip(task.slides, task.labels, strict=True)
    ]
    by_patient = _group_labels(task.slides, task.target)
    sample = "slide_id" if any(len(labels) > 1 for labels in by_patient.values()) else "case_id"
    config = [
        "datasets:",
        f"  - {_yaml_text(task.cohort)}",
        f"task_col: {_yaml_text(task.target)}",
        "extra_cols: []",
        "task_type: classification",
        "metrics:",
        "  - macro-ovr-auc",
        "label_dict:",
        *(f"  {number}: {_yaml_text(name)}" for number, name in enumerate(names)),
        f"sample_col: {sample}",
        f"num_samples: {len(task.slides) if sample == 'slide_id' else len(by_patient)}",
    ]
    header = ["case_id", "slide_id", task.target, *folds.values()]
    return {
        f"{task.folder}/k=all.tsv": _format_table(header, rows, delimiter="\t"),
        f"{task.folder}/config.yaml": "".join(f"{line}\n" for line in config).encode(),
    }


def _format_nnmil(task: _Task) -> dict[str, bytes]:
    """Return a dataset of nnMIL for each split. It creates folds itself, so each fold is a dataset with one split."""
    for name, ids in (
        ("slide_id", [slide.slide_id for slide in task.slides]),
        ("patient_id", [slide.patient_id for slide in task.slides]),
    ):
        _check_not_numbers("nnmil", name, ids)
    names = task.class_names
    files = {}
    for column in task.columns:
        folder = task.folder if column == "split" else f"{task.folder}/{column}"
        rows = [
            [slide.slide_id, slide.patient_id, slide.splits[column], str(names.index(label))]
            for slide, label in zip(task.slides, task.labels, strict=True)
            if slide.splits.get(column)
        ]
        title = f"{task.cohort} {task.target}" + ("" if column == "split" else f" {column}")
        dataset = {
            "dataset_id": re.sub(r"\W+", "_", title),
            "dataset_name": title,
            "name": title,
            "task_type": "classification",
            "labels": {str(number): name for number, name in enumerate(names)},
            "feature_dir": "/path/to/h5_files",
            "clinical_dir": "dataset.csv",
            "metric": "auc" if len(names) == 2 else "bacc",
            "evaluation_setting": "official_split",
        }
        files[f"{folder}/dataset.json"] = _format_json(dataset)
        files[f"{folder}/dataset.csv"] = _format_table(["slide_id", "patient_id", "split", "label"], rows)
    return files


def _format_stamp(slides: Sequence[SplitSlide], targets: Sequence[str], columns: Sequence[str]) -> dict[str, bytes]:
    """Return STAMP's tables of patients and slides, and for each target the splits of its cross-validation.

    STAMP takes validation patients from the training patients itself. It ignores the columns of splits in slide.csv.
    """
    label_by_patient: dict[str, dict[str, str]] = {slide.patient_id: {} for slide in slides}
    for target in targets:
        _check_text("stamp", f"label of {target}", [slide.labels.get(target, "") for slide in slides])
        by_patient = _group_labels(slides, target)
        if several := [patient for patient, labels in by_patient.items() if len(labels) > 1]:
            raise CohortError(
                f"Slides of one patient have different labels of {target}: {list_some(several)}. STAMP has one label "
                "per patient.",
                hint="Use another layout, such as --layout clam, or correct the labels.",
            )
        for patient, labels in by_patient.items():
            label_by_patient[patient][target] = next(iter(labels))
    clini = [[patient, *(labels.get(each, "") for each in targets)] for patient, labels in label_by_patient.items()]
    rows = [
        [slide.patient_id, f"{slide.slide_id}.h5", *(slide.splits.get(column, "") for column in columns)]
        for slide in slides
    ]
    files = {
        "clini.csv": _format_table(["PATIENT", *targets], clini),
        "slide.csv": _format_table(["PATIENT", "FILENAME", *columns], rows),
    }
    for target, folder in zip(targets, _folder_names(targets), strict=True):
        labelled = [patient for patient, labels in label_by_patient.items() if target in labels]
        splits = []
        for column in columns:
            train, test = _patients_in(slides, column, ("train", "val")), _patients_in(slides, column, ("test",))
            splits.append(
                {
                    "train_patients": [patient for patient in labelled if patient in train],
                    "test_patients": [patient for patient in labelled if patient in test],
                }
            )
        files[f"{folder}/splits.json"] = _format_json({"splits": splits})
    return files


_FORMATTERS: dict[str, Callable[[_Task], dict[str, bytes]]] = {
    "clam": _format_clam,
    "patho-bench": _format_patho_bench,
    "nnmil": _format_nnmil,
}


def _patients_in(slides: Iterable[SplitSlide], column: str, splits: Sequence[str]) -> set[str]:
    return {slide.patient_id for slide in slides if slide.splits.get(column) in splits}


def _group_labels(slides: Iterable[SplitSlide], target: str) -> dict[str, set[str]]:
    """Return the known labels of each patient."""
    labels: dict[str, set[str]] = defaultdict(set)
    for slide in slides:
        if label := slide.labels.get(target):
            labels[slide.patient_id].add(label)
    return labels


def _folder_names(targets: Sequence[str]) -> list[str]:
    """Return a different folder name for each target."""
    names: list[str] = []
    for target in targets:
        name = re.sub(r"[^\w.+-]+", "_", target).lstrip(".") or "target"
        names.append(name if name not in names else f"{name}_{len(names)}")
    return names


def _check_text(layout: str, what: str, texts: Iterable[str]) -> None:
    """Raise CohortError for texts that the tool reads as missing values."""
    if found := sorted(_PANDAS_MISSING.intersection(texts)):
        raise CohortError(
            f"A {what} is '{found[0]}', which {_TOOLS[layout]} reads as a missing value.",
            hint="Change this text in the table, or use the layout tapfm.",
        )


def _check_not_numbers(layout: str, what: str, ids: Sequence[str]) -> None:
    """Raise CohortError for ids that the tool reads as numbers: it loses leading zeros, or stops with an error."""
    if ids and all(re.fullmatch(r"[-+]?\d+(\.\d*)?", text) for text in ids):
        raise CohortError(
            f"Every {what} is a number, such as {ids[0]}. {_TOOLS[layout]} cannot use such ids.",
            hint="Add a letter to the ids, such as P1 instead of 1; for ids of slides, also rename the feature files.",
        )


def _format_table(header: Sequence[str], rows: Iterable[Sequence[str]], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue().encode()


def _format_json(value: Any) -> bytes:
    return (json.dumps(value, indent=4) + "\n").encode()


def _yaml_text(text: str) -> str:
    """Return a text as a YAML scalar in quotes."""
    return json.dumps(text)

"""The data of a run: its labelled slides with split, labels, and tiles or stored features."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tapfm.cohort.cohort_table import SlideRow
from tapfm.cohort.splits import SPLITS, TRAIN, find_split_problems, read_splits
from tapfm.config.settings import ClassesOfTarget, RunConfig
from tapfm.encoders.features import FeatureMetadata, find_feature_file, read_feature_metadata
from tapfm.errors import CohortError, LabelError, TapfmError, UnknownNameError
from tapfm.evaluation.predictions import LabelledSlide
from tapfm.results.table import Column, Table, table_row
from tapfm.runtime.files import file_identity, file_sha256, fingerprint
from tapfm.runtime.messages import format_command, format_count
from tapfm.slides.opening import list_slide_files
from tapfm.tasks.catalog import class_texts
from tapfm.tasks.label_columns import TargetRequest
from tapfm.tasks.labels import LabelledCohort, check_training_labels, label_count_columns, read_labelled_cohort
from tapfm.tasks.target import Label, TargetKinds
from tapfm.tiles.store import TileSet, read_slide_tiles

OPTIONAL_COHORT_COLUMNS = ("mpp", "cohort", "split")
_MAX_LISTED = 5  # slides named in a message
# Options of `tapfm split` and `tapfm config`, and how to set the same in a command that reads RUN.toml
_SETTING_OF_OPTION = {
    "--slides ": "--set cohort.slides=",
    "--patient-column ": "--set cohort.patient_column=",
    "--slides-are-patients": "--set cohort.slides_are_patients=true",
    "--encoding ": "--set cohort.encoding=",
}
_CHANGED_COLUMN_NAMES = {"tiles": "number of tiles"}  # columns of split.csv with another name in messages


@dataclass(frozen=True)
class StoredFeatures:
    """A feature file and its metadata."""

    path: Path
    metadata: FeatureMetadata


@dataclass(frozen=True)
class RunSlide:
    """A slide with its labels and, as far as they exist, its tiles and stored features."""

    row: SlideRow  # of the cohort table
    split: str
    labels: Mapping[str, Label]  # by target
    tiles: TileSet | None = None
    features: StoredFeatures | None = None

    @property
    def tiles_or_features_digest(self) -> str:
        """Digest that changes with the tiles, or with the features if the slide has no tiles."""
        if self.tiles is not None:
            return self.tiles.content_digest
        assert self.features is not None
        # a feature file of another tool has no fingerprint: hash the whole file
        return fingerprint(self.features.metadata.fingerprint or file_sha256(self.features.path))[:16]

    @property
    def slide_files_digest(self) -> str | None:
        """Digest that changes with size or modification time of the slide files; None if the files are missing.

        The digest does not depend on file names, so it stays the same if the files are moved or renamed.
        """
        try:
            files = [file_identity(file)[1:] for file in list_slide_files(self.row.path)]
        except OSError:
            return None
        return fingerprint(files)[:16] if files else None

    def column_value(self, name: str) -> str:
        """Return the value in a column of the cohort table, as text.

        mpp is rounded to two decimals, and taken from the tiles if the table has none.
        """
        if name in self.row.labels:
            return self.row.labels[name]
        if name == "mpp":
            mpp = self.row.mpp or (self.tiles.slide_mpp if self.tiles is not None else None)
            return "" if mpp is None else f"{mpp:.2f}"  # slides of one scanner may differ in the third decimal
        if name in OPTIONAL_COHORT_COLUMNS:
            return str(getattr(self.row, name) or "")
        columns = [*OPTIONAL_COHORT_COLUMNS, *self.row.labels]
        raise UnknownNameError.with_suggestions("column", name, columns, see=", ".join(columns))


@dataclass(frozen=True)
class RunData:
    """The slides of a run, and the slides of its cohort that cannot be used."""

    slides: tuple[RunSlide, ...]
    targets: TargetKinds
    slides_without_label: tuple[str, ...]  # ids of slides without any label
    failed: Mapping[str, str]  # why slide file, tiles or features could not be read, by slide id
    missing_files: tuple[str, ...] = ()  # ids of failed slides without a slide file
    notes: tuple[str, ...] = ()  # how the cohort table was read
    warnings: tuple[str, ...] = ()  # about the patients of the table

    def slides_in(self, split: str) -> list[RunSlide]:
        return [slide for slide in self.slides if slide.split == split]

    def training_labels(self) -> dict[str, list[Label]]:
        """Return the labels of the training slides by target, to compute class weights."""
        return {target: [slide.labels[target] for slide in self.slides_in(TRAIN)] for target in self.targets}

    @property
    def split_csv_columns(self) -> list[str]:
        """The columns of split.csv."""
        return ["slide_id", "patient_id", "cohort", "split", *self.targets, "tiles", "digest"]

    def format_split_csv_rows(self) -> list[list[str]]:
        """Return the rows of split.csv: one per slide, with a digest to detect changes of its tiles or features."""
        return [
            [
                *(slide.row.slide_id, slide.row.patient_id, slide.row.cohort or "", slide.split),
                *(kind.format_label(slide.labels[target]) for target, kind in self.targets.items()),
                *("" if slide.tiles is None else str(len(slide.tiles)), slide.tiles_or_features_digest),
            ]
            for slide in self.slides
        ]


def read_run_data(config: RunConfig) -> RunData:
    """Read the data of a run and check everything that can be checked without opening a slide."""
    fold = config.cohort.fold
    labelled = _read_run_cohort(config)
    cohort, targets, labels = labelled.cohort, labelled.targets, labelled.labels
    splits = read_splits(cohort, fold)
    column = "split" if fold is None else f"fold_{fold}"
    check_training_labels(cohort, splits, labels, targets, column)
    labels_by_slide = {
        row.slide_id: {target: labels[target][i] for target in targets} for i, row in enumerate(cohort.rows)
    }
    rows = [row for row in cohort.rows if row.slide_id in splits]
    with_label = [row for row in rows if any(label is not None for label in labels_by_slide[row.slide_id].values())]
    unlabelled = {row.slide_id for row in rows} - {row.slide_id for row in with_label}
    uses_features = config.adaptation.method == "fixed"
    slides, failed = [], {}
    for row in with_label:
        try:
            tiles = None if uses_features else _find_tiles(config, row)
            features = _find_features(config, row) if uses_features else None
        except TapfmError as error:
            failed[row.slide_id] = error.message
        else:
            slides.append(RunSlide(row, splits[row.slide_id], labels_by_slide[row.slide_id], tiles, features))
    data = RunData(
        tuple(slides),
        targets,
        tuple(sorted(unlabelled)),
        failed,
        tuple(row.slide_id for row in with_label if row.missing and row.slide_id in failed),
        tuple(map(_name_settings, labelled.notes)),
        tuple(map(_name_settings, labelled.warnings)),
    )
    _check_failures_allowed(config, data)
    _check_training_has_both_classes(config, data, column)
    return data


def _read_run_cohort(config: RunConfig) -> LabelledCohort:
    """Read the cohort of a run with its labels. Hints name the settings of RUN.toml instead of command-line options."""
    try:
        return read_labelled_cohort(
            config.cohort.table,
            config.cohort.table_options,
            TargetRequest(tuple(config.task.targets), config.class_texts),
            unit=config.selection.unit,
            checks=[partial(find_split_problems, fold=config.cohort.fold)],
        )
    except CohortError as error:
        raise CohortError(error.message, hint=_name_settings(error.hint)) from error


def _name_settings(text: str) -> str:
    """Return a hint or warning with the settings of RUN.toml in place of the options of `tapfm split` and `config`."""
    for option, setting in _SETTING_OF_OPTION.items():
        text = text.replace(option, setting)
    if re.search(r"--(target|positive|negative|missing)\b", text):
        text += "\n--target, --positive, --negative and --missing are options of tapfm config, which writes RUN.toml."
    return text


def complete_class_texts(config: RunConfig, data: RunData) -> RunConfig:
    """Return the configuration with the texts of both classes of each target, also those found in the table."""
    labels = {target: ClassesOfTarget(**texts) for target, texts in class_texts(data.targets).items()}
    return config.model_copy(update={"task": config.task.model_copy(update={"labels": labels})})


def _find_tiles(config: RunConfig, row: SlideRow) -> TileSet:
    assert config.tiles.folder is not None
    if row.missing:
        raise CohortError(row.missing)
    return read_slide_tiles(config.tiles.folder, row.slide_id)


def _find_features(config: RunConfig, row: SlideRow) -> StoredFeatures:
    assert config.tiles.features is not None
    path = find_feature_file(config.tiles.features, row.slide_id)
    if path is None:
        why = f"; {row.missing}" if row.missing else ""
        raise CohortError(f"no feature file in {config.tiles.features}{why}")
    return StoredFeatures(path, read_feature_metadata(path))


def _check_failures_allowed(config: RunConfig, data: RunData) -> None:
    """Raise CohortError if more slides than `machine.allow_failures`, or all slides, have no tiles or features."""
    if len(data.failed) <= config.machine.allow_failures and data.slides:
        return
    fixed = config.adaptation.method == "fixed"
    what, folder = ("features", config.tiles.features) if fixed else ("tiles", config.tiles.folder)
    total, missing = len(data.failed) + len(data.slides), len(data.missing_files)
    listed = [f"{slide_id}: {reason}" for slide_id, reason in list(data.failed.items())[:_MAX_LISTED]]
    if len(data.failed) > _MAX_LISTED:
        listed.append(f"... and {len(data.failed) - _MAX_LISTED:,} more")
    hints = []
    if missing < len(data.failed):
        hints.append(f"Create the {what}: {_preparation_command(config)}")
    if missing:
        hints.append("Search the slide files below another folder: --set cohort.slides=FOLDER")
    if data.slides:
        hints.append(f"Or continue without these slides: --allow-failures {len(data.failed)}")
    elif not missing:
        listed = [f"{folder} has no usable {what} of this cohort", *listed[:1]]
        setting = "tiles.features" if fixed else "tiles.folder"
        hints.append(f"Or use another folder: --set {setting}=DIR")
    absent = f"slide file or {what}" if missing else what
    text = f"{len(data.failed):,} of {total:,} slides have no {absent}:\n  "
    raise CohortError(text + "\n  ".join(listed), hint="\n".join(hints))


def preparation_commands(config: RunConfig) -> list[str]:
    """Return the commands that create the tiles, and for method fixed the features, whose folder does not exist."""
    fixed, tiles = config.adaptation.method == "fixed", config.tiles.folder
    has_features = config.tiles.features is not None and config.tiles.features.is_dir()
    commands = []
    if not (fixed and has_features) and not (tiles or Path("tiles")).is_dir():
        commands.append(format_command("tile", *_table_arguments(config), "--out", tiles or "tiles"))
    return [*commands, _preparation_command(config)] if fixed and not has_features else commands


def _table_arguments(config: RunConfig) -> list[str | Path]:
    """Return the arguments of `tapfm tile` and `tapfm embed` for the cohort table."""
    cohort = config.cohort
    arguments: list[str | Path] = [cohort.table]
    for name in ("slides", "encoding"):
        if value := getattr(cohort, name):
            arguments += [f"--{name}", value]
    return [*arguments, *(part for value in cohort.extra_missing_values for part in ("--missing", value))]


def _preparation_command(config: RunConfig) -> str:
    """Return the command that creates missing tiles or features."""
    cohort = _table_arguments(config)
    if config.adaptation.method == "fixed":
        tiles: list[str | Path] = [] if config.tiles.folder is None else ["--tiles", config.tiles.folder]
        out = config.tiles.features or "features"
        return format_command("embed", *cohort, "--encoder", config.encoder.name, *tiles, "--out", out)
    return format_command("tile", *cohort, "--out", config.tiles.folder or "tiles")


def _check_training_has_both_classes(config: RunConfig, data: RunData, column: str) -> None:
    """Raise LabelError if a target lacks a class in the training slides that have tiles or features."""
    for target, labels in data.training_labels().items():
        if missing := data.targets[target].missing_class(labels):
            raise LabelError(
                f"{target}: no {missing} training slide (column {column}) has tiles or features.",
                hint=f"Create the missing tiles or features: {_preparation_command(config)}",
            )


def list_labelled_slides(slides: Sequence[RunSlide]) -> list[LabelledSlide]:
    """Return the ids, labels and splits of the slides, without tiles or features."""
    return [
        LabelledSlide(slide.row.slide_id, slide.row.patient_id, slide.labels, slide.split, slide.row.cohort)
        for slide in slides
    ]


def describe_changed_slides(split_rows: Sequence[Mapping[str, str]], data: RunData) -> list[str]:
    """Return how the slides in `data` differ from the rows of a split.csv, one line per difference."""
    old = {row["slide_id"]: row for row in split_rows}
    new = {row[0]: dict(zip(data.split_csv_columns, row, strict=True)) for row in data.format_split_csv_rows()}
    lines = []
    if gone := [slide_id for slide_id in old if slide_id not in new]:
        lines.append(f"{format_count(len(gone), 'slide')} removed: {_list_some(gone)}")
    if added := [slide_id for slide_id in new if slide_id not in old]:
        lines.append(f"{format_count(len(added), 'slide')} added: {_list_some(added)}")
    for slide_id in [slide_id for slide_id in old if slide_id in new]:
        for name in dict.fromkeys([*old[slide_id], *new[slide_id]]):
            was, is_now = old[slide_id].get(name), new[slide_id].get(name)
            if was != is_now:
                change = (
                    "its tiles or features have changed"
                    if name == "digest"
                    else f"{_CHANGED_COLUMN_NAMES.get(name, name)} was '{was}', is now '{is_now}'"
                )
                lines.append(f"{slide_id}: {change}")
    return lines


def _list_some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")


def split_sizes_table(data: RunData) -> Table:
    """Return a table with the number of patients, slides and labels of each split."""
    columns = [Column("split", text=True), Column("patients"), Column("slides")]
    columns += label_count_columns(data.targets)
    rows = []
    for split in SPLITS:
        slides = data.slides_in(split)
        counts = [
            kind.label_count_cell([slide.labels[target] for slide in slides]) for target, kind in data.targets.items()
        ]
        rows.append(table_row(split, len({slide.row.patient_id for slide in slides}), len(slides), *counts))
    return Table(columns, rows)

"""The data of a run: labelled slides by split, where their tiles or features are, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfm.cohort.manifest import Cohort, SlideRow, read_cohort
from tapfm.cohort.splits import SPLITS, TRAIN, split_of_rows
from tapfm.config.settings import RunConfig
from tapfm.encoders.features import FeatureFacts, feature_file, read_feature_facts
from tapfm.errors import CohortError, LabelError, TapfmError, UnknownNameError
from tapfm.evaluation.predictions import LabelledSlide
from tapfm.results.table import Column, Table, table_row
from tapfm.runtime.files import file_identity, fingerprint, sha256_of
from tapfm.runtime.messages import command
from tapfm.slides.opening import files_of
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.labels import check_training_labels, count_columns, read_labels
from tapfm.tasks.target import Label, TargetKinds
from tapfm.tiles.store import TileSet, find_tiles

_OWN_COLUMNS = ("mpp", "cohort", "split")  # that every cohort table may have
_SHOWN = 5  # slides named in a message


@dataclass(frozen=True)
class StoredFeatures:
    """A file of features, and what it says of them."""

    path: Path
    facts: FeatureFacts


@dataclass(frozen=True)
class RunSlide:
    """A slide with its labels, and what is learnt from."""

    row: SlideRow
    split: str
    labels: Mapping[str, Label]
    tiles: TileSet | None = None
    features: StoredFeatures | None = None

    @property
    def content_digest(self) -> str:
        """Digest of the tiles, or of the features."""
        if self.tiles is not None:
            return self.tiles.content_digest
        assert self.features is not None
        # feature files of other tools have no fingerprint, so the whole file is hashed
        return fingerprint(self.features.facts.fingerprint or sha256_of(self.features.path))[:16]

    @property
    def files_digest(self) -> str | None:
        """Digest of size and modification time of the slide's files, whatever their names; None where they are gone."""
        try:
            files = [file_identity(file)[1:] for file in files_of(self.row.path)]
        except OSError:
            return None
        return fingerprint(files)[:16] if files else None

    def column(self, name: str) -> str:
        """Return the value of a column of the cohort table; the resolution also from the tiles, where it has none."""
        if name in self.row.labels:
            return self.row.labels[name]
        if name == "mpp":
            known = self.row.mpp or (self.tiles.slide_mpp if self.tiles is not None else None)
            return "" if known is None else f"{known:.2f}"  # scanners differ in the third digit
        if name in _OWN_COLUMNS:
            return str(getattr(self.row, name) or "")
        columns = [*_OWN_COLUMNS, *self.row.labels]
        raise UnknownNameError.of("column", name, columns, see=", ".join(columns))


@dataclass(frozen=True)
class RunData:
    """The slides of a run."""

    slides: tuple[RunSlide, ...]
    targets: TargetKinds
    without_label: tuple[str, ...]  # no label of any target: not used
    failed: Mapping[str, str]  # no tiles, and why

    def of(self, split: str) -> list[RunSlide]:
        """List the slides of a split."""
        return [slide for slide in self.slides if slide.split == split]

    def training_labels(self) -> dict[str, list[Label]]:
        """Give the labels that class weights are made of."""
        return {target: [slide.labels[target] for slide in self.of(TRAIN)] for target in self.targets}

    @property
    def columns(self) -> list[str]:
        """The columns of split.csv."""
        return ["slide_id", "patient_id", "cohort", "split", *self.targets, "tiles", "digest"]

    def rows(self) -> list[list[str]]:
        """Return the rows of split.csv: the slides of the run, with digests that show whether they changed."""
        return [
            [
                *(slide.row.slide_id, slide.row.patient_id, slide.row.cohort or "", slide.split),
                *(kind.format_label(slide.labels[target]) for target, kind in self.targets.items()),
                *("" if slide.tiles is None else str(len(slide.tiles)), slide.content_digest),
            ]
            for slide in self.slides
        ]


def read_data(config: RunConfig) -> RunData:
    """Read and check everything that can be checked without opening a slide."""
    cohort = _read_table(config)
    targets = target_kinds(config.task.targets)
    labels = read_labels(cohort, targets)
    splits = split_of_rows(cohort, config.cohort.fold)
    column = "split" if config.cohort.fold is None else f"fold_{config.cohort.fold}"
    check_training_labels(cohort, splits, labels, targets, column)
    of_row = {row.slide_id: {target: labels[target][i] for target in targets} for i, row in enumerate(cohort.rows)}
    rows = [row for row in cohort.rows if row.slide_id in splits]
    labelled = [row for row in rows if any(label is not None for label in of_row[row.slide_id].values())]
    unlabelled = {row.slide_id for row in rows} - {row.slide_id for row in labelled}
    find = _features_of if config.adaptation.method == "fixed" else _tiles_of
    slides, failed = [], {}
    for row in labelled:
        try:
            tiles, features = find(config, row)
        except TapfmError as error:
            failed[row.slide_id] = error.message
        else:
            slides.append(RunSlide(row, splits[row.slide_id], of_row[row.slide_id], tiles, features))
    data = RunData(tuple(slides), targets, tuple(sorted(unlabelled)), failed)
    _refuse_too_many_without_tiles(config, data)
    _refuse_one_class(config, data, column)
    return data


def _read_table(config: RunConfig) -> Cohort:
    """Read the cohort; advice about options is put as RUN.toml has it."""
    try:
        return read_cohort(config.cohort.table, config.cohort.slides, must_exist=config.adaptation.method != "fixed")
    except CohortError as error:
        hint = error.hint.replace("--slides FOLDER", "--set cohort.slides=FOLDER")
        raise CohortError(error.message, hint=hint) from error


def _tiles_of(config: RunConfig, row: SlideRow) -> tuple[TileSet, None]:
    """Find the tiles of a slide, in whichever layout."""
    assert config.tiles.folder is not None
    return find_tiles(config.tiles.folder, row.slide_id), None


def _features_of(config: RunConfig, row: SlideRow) -> tuple[None, StoredFeatures]:
    """Find the stored features of a slide."""
    assert config.tiles.features is not None
    path = feature_file(config.tiles.features, row.slide_id)
    if path is None:
        raise CohortError(f"no file of features in {config.tiles.features}")
    return None, StoredFeatures(path, read_feature_facts(path))


def _refuse_too_many_without_tiles(config: RunConfig, data: RunData) -> None:
    """Stop before any work when more slides lack tiles than may fail."""
    if len(data.failed) <= config.machine.allow_failures and data.slides:
        return
    fixed = config.adaptation.method == "fixed"
    what, folder = ("features", config.tiles.features) if fixed else ("tiles", config.tiles.folder)
    of_slides = len(data.failed) + len(data.slides)
    listed = [f"{slide_id}: {reason}" for slide_id, reason in list(data.failed.items())[:_SHOWN]]
    if len(data.failed) > _SHOWN:
        listed.append(f"... and {len(data.failed) - _SHOWN:,} more")
    hint = f"Make them: {_making_of(config)}"
    if data.slides:
        hint += f"\nOr go on without them: --allow-failures {len(data.failed)}"
    else:
        listed = [f"{folder} is no folder of {what} of this cohort"]
        setting = "tiles.features" if fixed else "tiles.folder"
        hint = f"Say which one is: --set {setting}=DIR\nOr make them: {_making_of(config)}"
    raise CohortError(
        f"{len(data.failed):,} of {of_slides:,} slides have no {what}:\n  " + "\n  ".join(listed), hint=hint
    )


def _making_of(config: RunConfig) -> str:
    """Say what to type for what is missing."""
    table = config.cohort.table
    if config.adaptation.method == "fixed":
        return command("embed", table, "--encoder", config.encoder.name, "--out", config.tiles.features or "features")
    return command("tile", table, "--out", config.tiles.folder or "tiles")


def _refuse_one_class(config: RunConfig, data: RunData, column: str) -> None:
    """Check again what can be learnt, now that slides without tiles are out."""
    for target, labels in data.training_labels().items():
        if data.targets[target].lacking(labels):
            raise LabelError(
                f"Without the slides that have no tiles, the training split (column {column}) does not have both "
                f"classes of {target}.",
                hint=f"Make their tiles: {_making_of(config)}",
            )


def labelled_slides(slides: Sequence[RunSlide]) -> list[LabelledSlide]:
    """Return the slides with their labels, without tiles."""
    return [
        LabelledSlide(slide.row.slide_id, slide.row.patient_id, slide.labels, slide.split, slide.row.cohort)
        for slide in slides
    ]


def describe_changes(before: Sequence[Mapping[str, str]], data: RunData) -> list[str]:
    """Describe how the rows of a split.csv differ from the slides of a run, slide by slide."""
    old = {row["slide_id"]: row for row in before}
    new = {row[0]: dict(zip(data.columns, row, strict=True)) for row in data.rows()}
    lines = []
    if gone := [slide_id for slide_id in old if slide_id not in new]:
        lines.append(f"{len(gone):,} slides are gone: {_some(gone)}")
    if added := [slide_id for slide_id in new if slide_id not in old]:
        lines.append(f"{len(added):,} slides are new: {_some(added)}")
    for slide_id in [slide_id for slide_id in old if slide_id in new]:
        for name in dict.fromkeys([*old[slide_id], *new[slide_id]]):
            was, is_now = old[slide_id].get(name), new[slide_id].get(name)
            if was != is_now:
                said = "its tiles are others" if name == "digest" else f"{name} was '{was}', is '{is_now}'"
                lines.append(f"{slide_id}: {said}")
    return lines


def _some(names: Sequence[str]) -> str:
    """List the first few of many names."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def sizes_table(data: RunData) -> Table:
    """Return the numbers of patients, slides and labels of each split."""
    columns = [Column("split", text=True), Column("patients"), Column("slides")]
    columns += count_columns(data.targets)
    rows = []
    for split in SPLITS:
        slides = data.of(split)
        counts = [kind.count_cell([slide.labels[target] for slide in slides]) for target, kind in data.targets.items()]
        rows.append(table_row(split, len({slide.row.patient_id for slide in slides}), len(slides), *counts))
    return Table(columns, rows)

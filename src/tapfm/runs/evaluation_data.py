"""Select the slides of an evaluation: held-out slides of the cohort of the run, or slides of another cohort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tapfm.cohort.cohort_table import Cohort, SlideRow, read_cohort
from tapfm.cohort.splits import (
    ALL,
    SPLITS,
    TEST,
    TRAIN,
    VALIDATION,
    parse_split,
    parse_split_option,
    read_splits,
)
from tapfm.cohort.table_options import DEFAULT_TABLE_OPTIONS, TableOptions
from tapfm.encoders.features import find_feature_file, read_feature_metadata
from tapfm.errors import CohortError, InputError, RunError, TapfmError
from tapfm.runs.cross_validation import is_cross_validation
from tapfm.runs.data import RunSlide, StoredFeatures
from tapfm.runs.evaluation_labels import describe_other_texts, read_evaluation_labels
from tapfm.runs.evaluation_overlap import check_patient_overlap
from tapfm.runs.model_folder import ModelFolder, ModelMember
from tapfm.runtime.messages import format_command, format_count
from tapfm.tasks.catalog import ClassTexts
from tapfm.tiles.store import TileSet, read_slide_tiles

_MAX_LISTED = 10  # changes or patients listed in a message


@dataclass(frozen=True)
class EvaluationRequest:
    """Options of an evaluation.

    Without `cohort_table`, a folder that is None defaults to that of the run. `features_folder` has this default only
    if the encoder is fixed and `tiles_folder` is None. A given `features_folder` is used even with `tiles_folder`.
    """

    cohort_table: Path | None = None  # None: the cohort table of the run
    table_options: TableOptions = DEFAULT_TABLE_OPTIONS  # of a given cohort table; for that of the run only `slides`
    class_texts: ClassTexts = field(default_factory=dict)  # texts of the classes in a given cohort table
    tiles_folder: Path | None = None
    features_folder: Path | None = None
    split: str | None = None  # None: the test split of the cohort of the run, or every slide of another cohort
    allow_overlap: bool = False  # whether evaluated patients may also be in training or validation
    unit: str | None = None  # slide or patient; None: as in training
    by: tuple[str, ...] = ()  # columns of subgroups


@dataclass(frozen=True)
class EvaluationSlides:
    """The slides to evaluate, excluded slides, and notes for the report."""

    slides: tuple[RunSlide, ...]
    cohort_table: Path
    split: str | None  # None: every labelled slide of another cohort
    is_run_cohort: bool  # whether this is the cohort of the run; False: another cohort
    missing_targets: tuple[str, ...]  # targets of the model without a column in the cohort table
    slides_without_label: tuple[str, ...]  # ids of slides without a label of any target
    failed: Mapping[str, str]  # why tiles or features could not be read, by slide id
    notes: tuple[str, ...]
    tiles_folder: Path | None
    features_folder: Path | None  # None: features are computed from the tiles
    table_notes: tuple[str, ...] = ()  # how the cohort table was read
    table_warnings: tuple[str, ...] = ()  # about the patients of the table
    clini: Path | None = None  # table of patients that was joined with the cohort table

    def input_digests(self) -> dict[str, str]:
        """Return a digest of the inputs of each slide, by slide id.

        The inputs are the stored features or, without stored features, the tiles and the slide files.
        """
        return {
            slide.row.slide_id: slide.tiles_or_features_digest
            + (slide.slide_files_digest or "" if slide.features is None else "")
            for slide in self.slides
        }


def read_evaluation_slides(model_folder: ModelFolder, request: EvaluationRequest) -> EvaluationSlides:
    """Find the slides to evaluate, and check everything that can be checked without opening a slide."""
    split = None if request.split is None else parse_split_option(request.split, (*SPLITS, ALL))
    is_run_cohort = request.cohort_table is None
    cohort_table, options, tiles_folder, features_folder = _find_input_paths(model_folder, request)
    labelled = read_evaluation_labels(
        model_folder,
        cohort_table,
        options,
        None if is_run_cohort else request.class_texts,
        unit=request.unit,
        by=request.by,
    )
    cohort, labels = labelled.cohort, labelled.labels
    missing_targets = tuple(each for each in model_folder.targets if each not in labels)
    if is_run_cohort:
        splits = _select_run_cohort_slides(model_folder, cohort, split or TEST)
    else:
        splits = _select_external_slides(cohort, split)
    table_notes = [*labelled.notes, *describe_other_texts(model_folder, labelled)]
    chosen, slides_without_label, failed = [], [], {}
    for i, row in enumerate(cohort.rows):
        if row.slide_id not in splits:
            continue
        slide_labels = {target: labels[target][i] if target in labels else None for target in model_folder.targets}
        if all(label is None for label in slide_labels.values()):
            slides_without_label.append(row.slide_id)
            continue
        try:
            inputs = _find_inputs(row, tiles_folder, features_folder)
            slide = RunSlide(row, splits[row.slide_id], slide_labels, *inputs)
        except TapfmError as error:
            failed[row.slide_id] = error.message
        else:
            chosen.append(slide)
    searched_split = (split or TEST) if is_run_cohort else split
    _check_any_slide_chosen(cohort, chosen, failed, tiles_folder, features_folder, searched_split)
    if features_folder is None:
        _check_any_file_exists(cohort, [slide.row for slide in chosen])
    if is_run_cohort:
        _check_slides_unchanged(model_folder, chosen)
    notes = check_patient_overlap(
        model_folder, chosen, is_run_cohort=is_run_cohort, allow_overlap=request.allow_overlap
    )
    if is_run_cohort and (split or TEST) != TEST:
        notes.insert(0, _not_held_out_warning(split or TEST))
    return EvaluationSlides(
        tuple(chosen),
        cohort_table,
        (split or TEST) if is_run_cohort else split,
        is_run_cohort,
        missing_targets,
        tuple(slides_without_label),
        failed,
        tuple(notes),
        tiles_folder,
        features_folder,
        tuple(table_notes),
        tuple(labelled.warnings),
        options.clini,
    )


def _not_held_out_warning(split: str) -> str:
    """Return the warning for an evaluation on slides that were used for training or validation."""
    uses = {TRAIN: "trained on these slides", VALIDATION: "selected on these slides"}
    use = uses.get(split, "trained on some of these slides")
    return f"NOT HELD OUT: the model was {use}, so these metrics are optimistic."


def _find_input_paths(
    model_folder: ModelFolder, request: EvaluationRequest
) -> tuple[Path, TableOptions, Path | None, Path | None]:
    """Return the cohort table, how to read it, and the folders of tiles and features.

    They are the requested ones. If no cohort table is requested, the other paths default to those of the run.

    Raises InputError if the requested inputs do not suit the model, RunError if the cohort of the run cannot be used.
    """
    config = model_folder.config
    if request.features_folder is not None and model_folder.adapted:
        raise InputError(
            f"{model_folder.path} has an adapted encoder, so features of the original encoder cannot be used.",
            hint="Use tiles instead: --tiles DIR",
        )
    if request.features_folder is not None and len({member.encoder for member in model_folder.members}) > 1:
        raise InputError(
            f"The members of {model_folder.path} have different encoders, so --features cannot be used.",
            hint="Use tiles instead: --tiles DIR",
        )
    if request.cohort_table is not None:
        if request.tiles_folder is None and request.features_folder is None:
            raise InputError(
                f"No tiles are given for {request.cohort_table}.",
                hint=f"Add --tiles DIR{'' if model_folder.adapted else ' or --features DIR'}. To create tiles: "
                + format_command("tile", request.cohort_table, "--out", "tiles-external"),
            )
        return request.cohort_table, request.table_options, request.tiles_folder, request.features_folder
    if model_folder.ensemble == "folds":
        path = model_folder.path
        of_cohort = "A study has out-of-fold metrics of its cohort."
        if is_cross_validation(path):
            of_cohort = f"The out-of-fold metrics of its cohort are in {path / 'metrics.md'}."
        raise RunError(
            f"{path} is an ensemble of folds: each slide of its cohort was used to train some member.",
            hint=f"Evaluate it on another cohort: --cohort EXTERNAL.csv. {of_cohort}",
        )
    if config is None:
        raise RunError(
            f"{model_folder.path} is an {model_folder.kind}, which does not contain the cohort it was trained on.",
            hint="Add the cohort to evaluate on: --cohort COHORT.csv --tiles DIR",
        )
    use_features_of_run = not model_folder.adapted and request.tiles_folder is None
    return (
        config.cohort.table,
        replace(config.cohort.table_options, slides=request.table_options.slides or config.cohort.slides),
        request.tiles_folder or config.tiles.folder,
        request.features_folder or (config.tiles.features if use_features_of_run else None),
    )


def _select_run_cohort_slides(model_folder: ModelFolder, cohort: Cohort, split: str) -> dict[str, str]:
    """Select the slides of a split (or ALL) from the cohort of the run. Returns their splits by slide id."""
    config = model_folder.config
    assert config is not None
    splits = read_splits(cohort, config.cohort.fold)
    return {slide_id: each for slide_id, each in splits.items() if split in (ALL, each)}


def _select_external_slides(cohort: Cohort, split: str | None) -> dict[str, str]:
    """Select the slides of a split (None or ALL: every slide) from an external cohort. Returns splits by slide id."""
    if split is None or split == ALL:
        return {row.slide_id: row.split or "" for row in cohort.rows}
    if not any(row.split for row in cohort.rows):
        raise CohortError(
            f"{cohort.table_path} has no column 'split', or this column is empty.",
            hint="Omit --split to evaluate every slide.",
        )
    return {row.slide_id: split for row in cohort.rows if row.split and parse_split(row.split) == split}


def _find_inputs(
    row: SlideRow, tiles_folder: Path | None, features_folder: Path | None
) -> tuple[TileSet | None, StoredFeatures | None]:
    """Return the tiles of a slide, or its stored features if `features_folder` is given."""
    if features_folder is None:
        assert tiles_folder is not None
        return read_slide_tiles(tiles_folder, row.slide_id), None
    path = find_feature_file(features_folder, row.slide_id)
    if path is None:
        raise CohortError(f"no feature file in {features_folder}")
    return None, StoredFeatures(path, read_feature_metadata(path))


def _check_any_slide_chosen(
    cohort: Cohort,
    chosen: Sequence[RunSlide],
    failed: Mapping[str, str],
    tiles_folder: Path | None,
    features_folder: Path | None,
    split: str | None,
) -> None:
    """Raise CohortError if no slide can be evaluated."""
    if chosen:
        return
    source = cohort.table_path or Path("COHORT.csv")
    if failed:
        uses_features = features_folder is not None
        what, folder = ("features", features_folder) if uses_features else ("tiles", tiles_folder)
        slide_id, reason = next(iter(failed.items()))
        option = f"Use another folder: --{what} DIR"
        tile_command = format_command("tile", source, "--out", folder or "tiles")
        raise CohortError(
            f"{folder} has no usable {what} for any of the {format_count(len(failed), 'slide')} to evaluate (cohort "
            f"table: {source}). For example {slide_id}: {reason.rstrip('.')}.",
            hint=f"{option}\nOr compute the features from tiles: --tiles DIR"
            if uses_features
            else f"{option}\nOr create tiles: {tile_command}",
        )
    of_split, hint = "", "Write 1, 0, or nothing (unknown) in the columns of the targets."
    if split:
        of_split, hint = f" in the split {split}", f"Valid splits: {', '.join(SPLITS)} and {ALL}."
    raise CohortError(f"{source} has no labelled slide{of_split}.", hint=hint)


def _check_any_file_exists(cohort: Cohort, rows: Sequence[SlideRow]) -> None:
    """Raise CohortError if none of the files of these slides exists."""
    if not any(row.path.exists() for row in rows):
        raise CohortError(
            f"None of the files of the {format_count(len(rows), 'slide')} to evaluate exists, for example "
            f"{rows[0].path} (cohort table: {cohort.table_path}).",
            hint="Pass the folder of the slides: --slides FOLDER",
        )


def _check_slides_unchanged(model_folder: ModelFolder, slides: Sequence[RunSlide]) -> None:
    """Raise RunError if the split, labels, tiles or features of an evaluated slide have changed since the run."""
    lines = []
    for member in model_folder.members:
        row_by_slide = {row["slide_id"]: row for row in member.read_split_rows()}
        for slide in slides:
            if (row := row_by_slide.get(slide.row.slide_id)) is not None:
                lines += [f"{slide.row.slide_id}: {each}" for each in _describe_slide_changes(slide, row, member)]
    if lines:
        shown = lines[:_MAX_LISTED] + (
            [f"... and {len(lines) - _MAX_LISTED:,} more"] if len(lines) > _MAX_LISTED else []
        )
        raise RunError(
            f"The cohort has changed since {model_folder.path} was trained:\n  " + "\n  ".join(shown),
            hint="Undo the changes, or evaluate on the changed cohort: --cohort COHORT.csv --tiles DIR",
        )


def _describe_slide_changes(slide: RunSlide, row: Mapping[str, str], member: ModelMember) -> list[str]:
    """Return how a slide differs from its row in the split.csv of the run."""
    changes = []
    if row["split"] != slide.split:
        changes.append(f"split was '{row['split']}', is now '{slide.split}'")
    for target, kind in member.targets.items():
        label = kind.format_label(slide.labels[target])
        if row[target] != label:
            changes.append(f"{target} was '{row[target]}', is now '{label}'")
    # with a fixed encoder, the digest in split.csv is that of the features, so tiles cannot be compared with it
    comparable = member.adapted or slide.features is not None
    if comparable and row["digest"] != slide.tiles_or_features_digest:
        changes.append("its tiles have changed" if member.adapted else "its features have changed")
    return changes


def read_run_slides(member: ModelMember) -> list[RunSlide]:
    """Return the slides in the split.csv of a run, with tiles and features as far as the files still exist.

    Slides that are no longer in the cohort table are omitted. The list is empty for an export, or if the cohort table
    cannot be read.
    """
    config = member.config
    if config is None:
        return []
    try:
        cohort = read_cohort(config.cohort.table, config.cohort.table_options)
    except TapfmError:
        return []
    rows = {row.slide_id: row for row in cohort.rows}
    found = []
    for split_row in member.read_split_rows():
        row = rows.get(split_row["slide_id"])
        if row is not None:
            labels = {target: kind.parse_label(split_row[target]) for target, kind in member.targets.items()}
            slide = RunSlide(row, split_row["split"], labels)
            found.append(attach_inputs(slide, config.tiles.folder, config.tiles.features))
    return found


def attach_inputs(slide: RunSlide, tiles_folder: Path | None, features_folder: Path | None) -> RunSlide:
    """Return the slide with its tiles and features, as far as they exist in these folders."""
    found = slide
    for folder, kind in ((tiles_folder, "tiles"), (features_folder, "features")):
        if folder is None or getattr(found, kind) is not None:
            continue
        try:
            if kind == "tiles":
                found = replace(found, tiles=read_slide_tiles(folder, slide.row.slide_id))
            else:
                found = replace(found, features=_find_inputs(slide.row, None, folder)[1])
        except TapfmError:
            continue
    return found

"""Which slides are evaluated: those of the run's own cohort that it did not learn from, or another cohort's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tapfm.cohort.manifest import Cohort, SlideRow, read_cohort
from tapfm.cohort.splits import ALL, SPLITS, TEST, TRAIN, VALIDATION, canonical_split, list_some, split_of_rows
from tapfm.encoders.features import feature_file, read_feature_facts
from tapfm.errors import CohortError, InputError, RunError, TapfmError
from tapfm.runs.data import RunSlide, StoredFeatures
from tapfm.runs.model_folder import ModelFolder, ModelMember
from tapfm.runtime.messages import command, counted
from tapfm.tasks.labels import read_labels
from tapfm.tiles.store import TileSet, find_tiles

_SHOWN = 10  # slides, or patients, named in a message


@dataclass(frozen=True)
class EvaluationChoice:
    """What is asked for; what is None is as the run has it."""

    cohort: Path | None = None
    slides: Path | None = None
    tiles: Path | None = None
    features: Path | None = None
    split: str | None = None
    allow_overlap: bool = False


@dataclass(frozen=True)
class EvaluatedSlides:
    """The slides, and what is to be said of them."""

    slides: tuple[RunSlide, ...]
    table: Path
    split: str | None  # None: every labelled row of another cohort
    own: bool  # the run's own cohort
    absent_targets: tuple[str, ...]  # the table has no such column
    without_label: tuple[str, ...]
    failed: Mapping[str, str]
    notes: tuple[str, ...]
    tiles: Path | None
    features: Path | None  # None: pixels are encoded

    def contents(self) -> dict[str, str]:
        """Return a digest of the tiles and files, or of the features, of each slide."""
        return {
            slide.row.slide_id: slide.content_digest + (slide.files_digest or "" if slide.features is None else "")
            for slide in self.slides
        }


def read_slides(evaluated: ModelFolder, choice: EvaluationChoice) -> EvaluatedSlides:
    """Find the slides; everything that can be refused without opening one is refused here."""
    split = None if choice.split is None else choice.split.lower()
    if split not in (None, ALL):
        split = canonical_split(split)
    own = choice.cohort is None
    table, slides_folder, tiles, features = _sources_of(evaluated, choice)
    cohort = read_cohort(table, slides_folder, must_exist=False)  # a slide that is gone costs that slide
    absent = () if own else tuple(each for each in evaluated.targets if each not in cohort.label_names)
    if len(absent) == len(evaluated.targets):
        read_labels(cohort, evaluated.targets)  # says which columns there are
    labels = read_labels(cohort, {name: kind for name, kind in evaluated.targets.items() if name not in absent})
    splits = _splits_of(evaluated, cohort, split or TEST) if own else _splits_of_another(cohort, split)
    chosen, without_label, failed = [], [], {}
    for i, row in enumerate(cohort.rows):
        if row.slide_id not in splits:
            continue
        known = {target: labels[target][i] if target in labels else None for target in evaluated.targets}
        if all(label is None for label in known.values()):
            without_label.append(row.slide_id)
            continue
        try:
            slide = RunSlide(row, splits[row.slide_id], known, *_inputs_of(row, tiles, features))
        except TapfmError as error:
            failed[row.slide_id] = error.message
        else:
            chosen.append(slide)
    _refuse_none(cohort, chosen, failed, tiles, features, split)
    if features is None:
        _refuse_no_files(cohort, [slide.row for slide in chosen])
    if own:
        _refuse_changed(evaluated, chosen)
    notes = _refuse_overlap(evaluated, chosen, own=own, allow=choice.allow_overlap)
    if own and (split or TEST) != TEST:
        notes.insert(0, _not_held_out(split or TEST))
    return EvaluatedSlides(
        tuple(chosen),
        table,
        (split or TEST) if own else split,
        own,
        absent,
        tuple(without_label),
        failed,
        tuple(notes),
        tiles,
        features,
    )


def _not_held_out(split: str) -> str:
    """Warn of figures on slides that were learnt from."""
    seen = {TRAIN: "learnt from these slides", VALIDATION: "was chosen by these slides"}
    how = seen.get(split, "learnt from some of these slides")
    return f"NOT HELD OUT: the model {how}, so these figures do not say how well it does on others."


def _sources_of(evaluated: ModelFolder, choice: EvaluationChoice) -> tuple[Path, Path | None, Path | None, Path | None]:
    """Say where table, slides, tiles and features are; features are only taken by models whose encoder is fixed."""
    config = evaluated.config
    if choice.features is not None and evaluated.adapted:
        raise InputError(
            f"{evaluated.path} has an adapted encoder, and stored features are of the one before.",
            hint="Give the tiles instead: --tiles DIR",
        )
    if choice.features is not None and len({member.encoder for member in evaluated.members}) > 1:
        raise InputError("The members have different encoders.", hint="Give the tiles instead: --tiles DIR")
    if choice.cohort is not None:
        if choice.tiles is None and choice.features is None:
            raise InputError(
                f"Where are the tiles of {choice.cohort}?",
                hint=f"Give --tiles DIR{'' if evaluated.adapted else ' or --features DIR'}. To make them: "
                + command("tile", choice.cohort, "--out", "tiles-external"),
            )
        return choice.cohort, choice.slides, choice.tiles, choice.features
    if evaluated.ensemble == "folds":
        raise RunError(
            f"{evaluated.path} is an ensemble of folds: each slide of its cohort was learnt from by some member.",
            hint="The honest figure there is out-of-fold; for the ensemble, give another cohort: --cohort EXTERNAL.csv",
        )
    if config is None:
        raise RunError(
            f"{evaluated.path} is an {evaluated.kind}, which does not bring its cohort along.",
            hint="Say what to evaluate it on: --cohort COHORT.csv --tiles DIR",
        )
    stored = config.tiles.features if not evaluated.adapted and choice.tiles is None else None
    tiles = choice.tiles or config.tiles.folder
    return config.cohort.table, choice.slides or config.cohort.slides, tiles, choice.features or stored


def _splits_of(evaluated: ModelFolder, cohort: Cohort, split: str) -> dict[str, str]:
    """Take the slides of a split of the run's own cohort."""
    config = evaluated.config
    assert config is not None
    splits = split_of_rows(cohort, config.cohort.fold)
    return {slide_id: each for slide_id, each in splits.items() if split in (ALL, each)}


def _splits_of_another(cohort: Cohort, split: str | None) -> dict[str, str]:
    """Take all slides of another cohort, or those of a split that it has."""
    if split is None or split == ALL:
        return {row.slide_id: row.split or "" for row in cohort.rows}
    if not any(row.split for row in cohort.rows):
        raise CohortError(f"{cohort.source} has no column split.", hint="Leave --split out to evaluate every slide.")
    return {row.slide_id: split for row in cohort.rows if row.split and canonical_split(row.split) == split}


def _inputs_of(
    row: SlideRow, tiles: Path | None, features: Path | None
) -> tuple[TileSet | None, StoredFeatures | None]:
    """Find the features of a slide, or its tiles."""
    if features is None:
        assert tiles is not None
        return find_tiles(tiles, row.slide_id), None
    path = feature_file(features, row.slide_id)
    if path is None:
        raise CohortError(f"no file of features in {features}")
    return None, StoredFeatures(path, read_feature_facts(path))


def _refuse_none(
    cohort: Cohort,
    chosen: Sequence[RunSlide],
    failed: Mapping[str, str],
    tiles: Path | None,
    features: Path | None,
    split: str | None,
) -> None:
    """Refuse to evaluate nothing."""
    if chosen:
        return
    source = cohort.source or Path("COHORT.csv")
    if failed:
        what, folder = ("features", features) if features is not None else ("tiles", tiles)
        option = f"Say which one is: --{what} DIR"
        make = command("tile", source, "--out", folder or "tiles")
        raise CohortError(
            f"{folder} has no {what} of any of {counted(len(failed), 'slide')} of {source}.",
            hint=f"{option}\nOr give tiles, which are encoded on the way: --tiles DIR"
            if features is not None
            else f"{option}\nOr make them: {make}",
        )
    of_split, hint = "", "Write 1, 0, or nothing where it is not known, in the columns of the targets."
    if split:
        of_split, hint = f" in the split {split}", f"Splits are {', '.join(SPLITS)} and {ALL}."
    raise CohortError(f"{source} has no labelled slide{of_split}.", hint=hint)


def _refuse_no_files(cohort: Cohort, rows: Sequence[SlideRow]) -> None:
    """Refuse a cohort none of whose slides is where the table says."""
    if not any(row.path.exists() for row in rows):
        raise CohortError(
            f"None of the {len(rows):,} slides of {cohort.source} is there, for example {rows[0].path}.",
            hint="Say where to look: --slides FOLDER",
        )


def _refuse_changed(evaluated: ModelFolder, slides: Sequence[RunSlide]) -> None:
    """Refuse slides whose split, labels or tiles are not those of the run any more."""
    lines = []
    for member in evaluated.members:
        recorded = {row["slide_id"]: row for row in member.slides()}
        for slide in slides:
            if (row := recorded.get(slide.row.slide_id)) is not None:
                lines += [f"{slide.row.slide_id}: {each}" for each in _changes_of(slide, row, member)]
    if lines:
        shown = lines[:_SHOWN] + ([f"... and {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else [])
        raise RunError(
            f"The cohort is not what {evaluated.path} was trained on any more:\n  " + "\n  ".join(shown),
            hint="Put it back as it was. To evaluate it as another cohort: --cohort COHORT.csv --tiles DIR",
        )


def _changes_of(slide: RunSlide, row: Mapping[str, str], member: ModelMember) -> list[str]:
    """Say how a slide differs from what the run noted of it."""
    found = []
    if row["split"] != slide.split:
        found.append(f"was in {row['split']}, is in {slide.split}")
    for target, kind in member.targets.items():
        label = kind.format_label(slide.labels[target])
        if row[target] != label:
            found.append(f"{target} was '{row[target]}', is '{label}'")
    # tiles of a run with a fixed encoder are encoded anew: what it noted is of the features
    comparable = member.adapted or slide.features is not None
    if comparable and row["digest"] != slide.content_digest:
        found.append("its tiles are others" if member.adapted else "its features are others")
    return found


def _refuse_overlap(evaluated: ModelFolder, slides: Sequence[RunSlide], *, own: bool, allow: bool) -> list[str]:
    """Refuse patients that were learnt from; gives what is to be said where that is allowed or cannot be known."""
    learnt = evaluated.learnt_from()
    unknown = any(member.config is None for member in evaluated.members)
    notes = [
        "Whether it learnt from any of these patients cannot be checked: an export does not name its own."
    ] * unknown
    shared = {
        slide.row.patient_id: learnt[slide.row.patient_id]
        for slide in slides
        if slide.row.patient_id in learnt and (not own or slide.split == TEST)
    }
    if not shared:
        return notes
    named = [f"{patient} ({split})" for patient, split in sorted(shared.items())]
    if not allow:
        raise CohortError(
            f"{evaluated.path} has seen {counted(len(shared), 'patient')} of this cohort in training or validation: "
            f"{list_some(named, _SHOWN)}.",
            hint="Figures on them would flatter it. If these are other people with the same ids: --allow-overlap",
        )
    return [*notes, f"OVERLAP allowed: {counted(len(shared), 'patient')} were in training or validation too."]


def slides_of_run(member: ModelMember) -> list[RunSlide]:
    """List the slides that a run was made with, as it noted them, with files and tiles where these are still there."""
    config = member.config
    if config is None:
        return []
    try:
        cohort = read_cohort(config.cohort.table, config.cohort.slides, must_exist=False)
    except TapfmError:
        return []
    rows = {row.slide_id: row for row in cohort.rows}
    found = []
    for noted in member.slides():
        row = rows.get(noted["slide_id"])
        if row is not None:
            labels = {target: kind.parse_label(noted[target]) for target, kind in member.targets.items()}
            slide = RunSlide(row, noted["split"], labels)
            found.append(with_any_tiles(slide, config.tiles.folder, config.tiles.features))
    return found


def with_any_tiles(slide: RunSlide, tiles: Path | None, features: Path | None) -> RunSlide:
    """Find tiles and features of a slide, each where there are any."""
    found = slide
    for folder, kind in ((tiles, "tiles"), (features, "features")):
        if folder is None or getattr(found, kind) is not None:
            continue
        try:
            if kind == "tiles":
                found = replace(found, tiles=find_tiles(folder, slide.row.slide_id))
            else:
                found = replace(found, features=_inputs_of(slide.row, None, folder)[1])
        except TapfmError:
            continue
    return found

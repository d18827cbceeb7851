"""Which slides are predicted, on which tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tapfm.cohort.manifest import TABLE_SUFFIXES, Cohort, read_cohort
from tapfm.cohort.splits import SPLITS
from tapfm.encoders.catalog import encoder_card
from tapfm.errors import CohortError, InputError, LabelError, TapfmError
from tapfm.runs.data import RunSlide
from tapfm.runs.folder import RunFolder
from tapfm.runs.model_folder import ModelFolder, ModelMember, description_of
from tapfm.runtime.cohort_job import Failure
from tapfm.runtime.messages import counted
from tapfm.runtime.workers import WorkerPool
from tapfm.tasks.labels import read_labels
from tapfm.tasks.target import Label, TargetKinds
from tapfm.tiles.cohort_tiling import tile_cohort
from tapfm.tiles.grid import TileSpec
from tapfm.tiles.store import find_tiles

_SCALE_TOLERANCE = 0.05  # parts by which tiles may be wider, as scanners differ
_DEFAULT_MPP = 0.5  # taken where an encoder was made for several scales, or does not say, and neither does the run


@dataclass(frozen=True)
class RequestedSlides:
    """Slides to predict, and notes on them."""

    slides: tuple[RunSlide, ...]  # without tiles yet
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TiledSlides:
    """Slides with their tiles, and slides that have none."""

    slides: tuple[RunSlide, ...]
    failed: Mapping[str, Failure]


def read_sources(
    sources: Sequence[Path], slides_folder: Path | None, targets: TargetKinds, split: str | None = None
) -> RequestedSlides:
    """Read tables, folders and slides together; a slide that comes twice is refused unless it is the same.

    Of the same slide that counts which says most: a table with its labels, then a table, which may have its scale.
    With a split, slides that tables put into others, or into none, are left out; folders have no splits.
    """
    if split is not None and not any(source.suffix.lower() in TABLE_SUFFIXES for source in sources):
        raise InputError(
            "--split chooses slides of a table, and none was given.", hint="Such as: split.csv --split test"
        )
    found: dict[str, RunSlide] = {}
    says: dict[str, tuple[bool, bool]] = {}
    notes: list[str] = []
    for source in sources:
        cohort = read_cohort(source, slides_folder, must_exist=False)  # a slide that is gone costs that slide
        if split is not None and cohort.source is not None:
            cohort = _select_split(cohort, split, source)
        labels, note = _labels_of(cohort, targets)
        notes += note
        for row, known in zip(cohort.rows, labels, strict=True):
            before = found.get(row.slide_id)
            if before is not None and before.row.path.resolve() != row.path.resolve():
                raise CohortError(
                    f"Two slides have the id '{row.slide_id}':\n  {before.row.path}\n  {row.path}",
                    hint="Give them ids of their own in a table: slide_id,path",
                )
            much = any(label is not None for label in known.values()), cohort.source is not None
            if before is None or much > says[row.slide_id]:
                found[row.slide_id], says[row.slide_id] = RunSlide(row, row.split or "", known), much
    return RequestedSlides(tuple(found.values()), tuple(notes))


def _select_split(cohort: Cohort, split: str, source: Path) -> Cohort:
    """Keep the slides that a table puts into one split."""
    if split not in SPLITS:
        raise InputError(f"--split is {split}.", hint=f"It is {', '.join(SPLITS)}.")
    kept = tuple(row for row in cohort.rows if row.split == split)
    if not kept:
        there = sorted({row.split for row in cohort.rows if row.split})
        raise CohortError(
            f"{source} puts no slide into the split {split}.",
            hint=f"It has {', '.join(there)}." if there else "It has no splits: leave --split out, or tapfm split.",
        )
    return replace(cohort, rows=kept)


def _labels_of(cohort: Cohort, targets: TargetKinds) -> tuple[list[dict[str, Label]], list[str]]:
    """Read the labels that a table has of the targets: they are shown beside what is predicted, never used."""
    there = {target: kind for target, kind in targets.items() if target in cohort.label_names}
    try:
        labels = read_labels(cohort, there) if there else {}
    except LabelError as error:
        return [dict.fromkeys(targets) for _ in cohort.rows], [f"Labels are left out. {error.message}"]
    return [
        {target: labels[target][i] if target in labels else None for target in targets} for i in range(len(cohort))
    ], []


def _tile_spec(evaluated: ModelFolder) -> tuple[TileSpec, str]:
    """Say how tiles are laid: as those the model learnt from, or else as its encoder was made for; and which it is."""
    laid = [_tiling_spec_of(member) for member in evaluated.members]
    known = [each for each in laid if each is not None]
    if any(each != known[0] for each in known):
        lines = [f"{member.folder}: {each}" for member, each in zip(evaluated.members, laid, strict=True)]
        raise InputError(
            f"The members of {evaluated.path} learnt from tiles that were laid differently:\n  " + "\n  ".join(lines),
            hint="Predict with each of them alone.",
        )
    if known:
        names = {field.name for field in fields(TileSpec)}
        return TileSpec(**{name: value for name, value in known[0].items() if name in names}), "as it learnt from"
    card = encoder_card(evaluated.members[0].encoder)
    mpp = card.mpp[0] if card.mpp and _DEFAULT_MPP not in card.mpp else _DEFAULT_MPP
    return TileSpec(tile_px=card.tile_px, mpp=mpp), f"as {card.name} was made for; the run does not say how it had them"


def _tiling_spec_of(member: ModelMember) -> Mapping[str, Any] | None:
    """Find how the tiles that a member learnt from were laid."""
    if member.config is None:
        return description_of(member.folder).get("tiles")
    environments = RunFolder(member.folder).environments()
    if environments and (noted := environments[0].get("tiles")):
        return dict(noted)
    folder = member.config.tiles.folder
    if folder is None:
        return None
    for slide in member.slides():
        try:
            return find_tiles(folder, slide["slide_id"]).laid
        except TapfmError:
            continue
    return None


def find_or_make_tiles(
    requested: RequestedSlides,
    evaluated: ModelFolder,
    tiles: Path | None,
    out: Path,
    *,
    workers: int,
    pool: WorkerPool | None = None,
    console: Console,
) -> TiledSlides:
    """Return the tiles in a folder, or tile the slides."""
    if tiles is not None:
        laid = _stored_tiles(requested, tiles, {})
        if note := _describe_scale_difference(laid, evaluated):
            console.print(note, style="bold yellow", markup=False, soft_wrap=True)
        return laid
    spec, why = _tile_spec(evaluated)
    console.print(f"Tiles of {spec.tile_px} px at {spec.mpp:g} um per pixel, {why}.", markup=False, soft_wrap=True)
    rows = [slide.row for slide in requested.slides]
    table = tile_cohort(
        rows,
        out,
        spec,
        only=None,
        layout="trident",
        tissue=None,
        workers=workers,
        force=False,
        console=console,
        pool=pool,
    )
    failed = {
        each.slide_id: Failure(each.reason, _name_tiling_command(each.what_to_do), stage="tiles")
        for each in table.failed
    }
    return _stored_tiles(requested, out, failed)


def _name_tiling_command(advice: str) -> str:
    """Say whose options advice about tiles is of, where it names any."""
    return f"{advice} These are options of tapfm tile: then predict with --tiles." if "--" in advice else advice


def _describe_scale_difference(laid: TiledSlides, evaluated: ModelFolder) -> str:
    """Tell of tiles that show another width of tissue than those the model learnt from; nothing where none do."""
    learnt = [
        each["tile_px"] * each["mpp"] for member in evaluated.members if (each := _tiling_spec_of(member)) is not None
    ]
    for slide in laid.slides:
        tiles = slide.tiles
        if tiles is None or tiles.target_mpp is None:
            continue  # nobody knows
        side_um = tiles.tile_px * tiles.target_mpp
        if other := [each for each in learnt if abs(side_um / each - 1) > _SCALE_TOLERANCE]:
            return (
                f"Tiles of {slide.row.slide_id} are {side_um:g} um wide, and the model learnt from tiles of "
                f"{other[0]:g} um: what it says of another scale means little. Without --tiles they are laid anew."
            )
    return ""


def _stored_tiles(requested: RequestedSlides, folder: Path, failed: Mapping[str, Failure]) -> TiledSlides:
    """Find the tiles of each slide."""
    found, lost = [], dict(failed)
    for slide in requested.slides:
        if slide.row.slide_id in failed:
            continue
        try:
            found.append(replace(slide, tiles=find_tiles(folder, slide.row.slide_id)))
        except TapfmError as error:
            lost[slide.row.slide_id] = Failure(error.message, error.hint, stage="tiles")
    if not found and not failed:
        raise CohortError(
            f"{folder} has no tiles of any of {counted(len(requested.slides), 'slide')}.",
            hint="Give the folder that tapfm tile wrote for these slides, or leave --tiles out: they are laid anew.",
        )
    return TiledSlides(tuple(found), lost)

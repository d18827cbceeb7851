"""Which slides are predicted, on which tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tapfm.app.advice import counted
from tapfm.app.evaluating.members import Evaluated, Member, description_of
from tapfm.app.run_data import SlideOfRun
from tapfm.app.run_folder import RunFolder
from tapfm.app.tile_slides import tile_cohort
from tapfm.cohort.labels import read_labels
from tapfm.cohort.manifest import Cohort, read_cohort
from tapfm.encoders.catalog import encoder_card
from tapfm.errors import CohortError, InputError, LabelError, TapfmError
from tapfm.tiles.grid import TileSpec
from tapfm.tiles.store import find_tiles

USUAL_MPP = 0.5  # taken where an encoder was made for several scales, or does not say, and neither does the run


@dataclass(frozen=True)
class Asked:
    """Slides that are to be predicted, and what is to be said of them first."""

    slides: tuple[SlideOfRun, ...]  # without tiles yet
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Laid:
    """Slides with their tiles; slides without, and why, and what to do about it."""

    slides: tuple[SlideOfRun, ...]
    failed: Mapping[str, tuple[str, str]]


def read_sources(sources: Sequence[Path], slides_folder: Path | None, targets: Sequence[str]) -> Asked:
    """Read tables, folders and slides together; a slide that comes twice is refused unless it is the same."""
    found: dict[str, SlideOfRun] = {}
    notes: list[str] = []
    for source in sources:
        cohort = read_cohort(source, slides_folder, must_exist=False)  # a slide that is gone costs that slide
        labels, note = labels_of(cohort, targets)
        notes += note
        for row, known in zip(cohort.rows, labels, strict=True):
            before = found.get(row.slide_id)
            if before is not None and before.row.path.resolve() != row.path.resolve():
                raise CohortError(
                    f"Two slides have the id '{row.slide_id}':\n  {before.row.path}\n  {row.path}",
                    hint="Give them ids of their own in a table: slide_id,path",
                )
            if before is None or not any(label is not None for label in before.labels.values()):
                found[row.slide_id] = SlideOfRun(row, row.split or "", known)
    return Asked(tuple(found.values()), tuple(notes))


def labels_of(cohort: Cohort, targets: Sequence[str]) -> tuple[list[dict[str, int | None]], list[str]]:
    """Read the labels that a table has of the targets: they are shown beside what is predicted, never used."""
    there = [target for target in targets if target in cohort.label_names]
    try:
        labels = read_labels(cohort, there) if there else {}
    except LabelError as error:
        return [dict.fromkeys(targets) for _ in cohort.rows], [f"Labels are left out. {error.message}"]
    return [
        {target: labels[target][i] if target in labels else None for target in targets} for i in range(len(cohort))
    ], []


def tile_spec(evaluated: Evaluated) -> tuple[TileSpec, str]:
    """Say how tiles are laid: as those the model learnt from, or else as its encoder was made for; and which it is."""
    laid = [laid_by(member) for member in evaluated.members]
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
    mpp = card.mpp[0] if card.mpp and USUAL_MPP not in card.mpp else USUAL_MPP
    return TileSpec(tile_px=card.tile_px, mpp=mpp), f"as {card.name} was made for; the run does not say how it had them"


def laid_by(member: Member) -> Mapping[str, Any] | None:
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


def lay_tiles(
    asked: Asked, evaluated: Evaluated, tiles: Path | None, out: Path, *, workers: int, console: Console
) -> Laid:
    """Take the tiles that are there, or find the tissue of each slide and lay them."""
    if tiles is not None:
        return stored_tiles(asked, tiles, {})
    spec, why = tile_spec(evaluated)
    console.print(f"Tiles of {spec.tile_px} px at {spec.mpp:g} um per pixel, {why}.", markup=False, soft_wrap=True)
    rows = [slide.row for slide in asked.slides]
    report = tile_cohort(
        rows, out, spec, only=None, layout="trident", tissue=None, workers=max(1, workers), force=False, console=console
    )
    return stored_tiles(asked, out, {each.slide_id: (each.reason, each.what_to_do) for each in report.failed})


def stored_tiles(asked: Asked, folder: Path, failed: Mapping[str, tuple[str, str]]) -> Laid:
    """Find the tiles of each slide."""
    found, lost = [], dict(failed)
    for slide in asked.slides:
        if slide.row.slide_id in failed:
            continue
        try:
            found.append(replace(slide, tiles=find_tiles(folder, slide.row.slide_id)))
        except TapfmError as error:
            lost[slide.row.slide_id] = (error.message, error.hint)
    if not found and not failed:
        raise CohortError(
            f"{folder} has no tiles of any of {counted(len(asked.slides), 'slide')}.",
            hint="Give the folder that tapfm tile wrote for these slides, or leave --tiles out: they are laid anew.",
        )
    return Laid(tuple(found), lost)

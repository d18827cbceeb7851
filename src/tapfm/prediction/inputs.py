"""Slides to predict, and their tiles."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tapfm.cohort.cohort_table import Cohort, read_cohort
from tapfm.cohort.splits import parse_split, parse_split_option
from tapfm.cohort.table_files import TABLE_SUFFIXES
from tapfm.cohort.table_options import TableOptions
from tapfm.encoders.catalog import find_encoder_card
from tapfm.errors import CohortError, InputError, LabelError, TapfmError
from tapfm.runs.data import RunSlide
from tapfm.runs.folder import RunFolder
from tapfm.runs.model_folder import ModelFolder, ModelMember, read_export_metadata
from tapfm.runtime.cohort_job import SUMMARY_FILE, Failure
from tapfm.runtime.messages import format_count
from tapfm.runtime.workers import WorkerPool
from tapfm.slides.scale import MPP_OPTION, SCALE_HINT
from tapfm.tasks.binary_target import BinaryTarget
from tapfm.tasks.label_columns import needs_number_labels
from tapfm.tasks.labels import read_labels
from tapfm.tasks.target import Label, TargetKinds
from tapfm.tiles.cohort_tiling import tile_cohort
from tapfm.tiles.grid import TileSpec
from tapfm.tiles.records import TilingRecord
from tapfm.tiles.store import read_slide_tiles

_TILING_OPTION = re.compile(r"--(size|mpp|min-tissue|tissue|keep-pen|keep-blur|edge-tiles)\b")
_SCALE_TOLERANCE = 0.05  # relative difference in tile width that is accepted, because scanners differ
_MAX_WARNINGS = 5  # slides named in the terminal
_DEFAULT_MPP = 0.5  # for models that record no scale; if the encoder card lists only other scales, its first is used


@dataclass(frozen=True)
class RequestedSlides:
    """Slides to predict, and warnings about them."""

    slides: tuple[RunSlide, ...]  # without tiles yet
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class TiledSlides:
    """Slides with their tiles, and slides without readable tiles."""

    slides: tuple[RunSlide, ...]
    failed: Mapping[str, Failure]


def read_sources(
    sources: Sequence[Path], options: TableOptions, targets: TargetKinds, split: str | None = None
) -> RequestedSlides:
    """Read cohort tables, folders and slide files. Raises if two different slides have the same id.

    If a slide is given more than once, a table with labels takes precedence over a table, and a table over a folder.
    `split` selects the rows of tables that are in this split; slides from folders are always included.
    """
    if split is not None and not any(source.suffix.lower() in TABLE_SUFFIXES for source in sources):
        raise InputError(
            "--split needs a cohort table, and none was passed.", hint="For example: split.csv --split test"
        )
    found: dict[str, RunSlide] = {}
    precedence: dict[str, tuple[bool, bool]] = {}
    warnings: list[str] = []
    for source in sources:
        cohort = read_cohort(source, options)  # a missing file fails only that slide
        warnings += [*cohort.notes, *(f"{source}: {problem}" for problem in cohort.patient_problems)]
        if split is not None and cohort.table_path is not None:
            cohort = _select_split(cohort, split, source)
        labels, label_warnings = _read_known_labels(cohort, targets)
        warnings += label_warnings
        for row, known in zip(cohort.rows, labels, strict=True):
            before = found.get(row.slide_id)
            if before is not None and before.row.path.resolve() != row.path.resolve():
                raise CohortError(
                    f"Two slides have the id '{row.slide_id}':\n  {before.row.path}\n  {row.path}",
                    hint="Give them different ids in a cohort table with the columns slide_id,path.",
                )
            own_precedence = any(label is not None for label in known.values()), cohort.table_path is not None
            if before is None or own_precedence > precedence[row.slide_id]:
                found[row.slide_id] = RunSlide(row, row.split or "", known)
                precedence[row.slide_id] = own_precedence
    return RequestedSlides(tuple(found.values()), tuple(warnings))


def _select_split(cohort: Cohort, split: str, source: Path) -> Cohort:
    """Return the cohort with only the rows of one split."""
    split = parse_split_option(split)
    selected = tuple(row for row in cohort.rows if row.split and parse_split(row.split) == split)
    if not selected:
        splits = sorted({row.split for row in cohort.rows if row.split})
        hint = f"The table has {', '.join(splits)}."
        raise CohortError(
            f"{source} has no slide in the split {split}.",
            hint=hint if splits else "The table has no splits: omit --split, or create them with tapfm split.",
        )
    return replace(cohort, rows=selected)


def _read_known_labels(cohort: Cohort, targets: TargetKinds) -> tuple[list[dict[str, Label]], list[str]]:
    """Return the labels of each slide by target (None if unknown), and warnings. Predictions do not depend on them."""
    known = {
        target: BinaryTarget() if needs_number_labels(cohort, target, kind) else kind
        for target, kind in targets.items()
        if target in cohort.label_names
    }
    try:
        labels = read_labels(cohort, known) if known else {}
    except LabelError as error:
        return [dict.fromkeys(targets) for _ in cohort.rows], [f"Labels are ignored: {error.message}"]
    return [
        {target: labels[target][i] if target in labels else None for target in targets} for i in range(len(cohort))
    ], []


def _choose_tile_spec(model_folder: ModelFolder) -> tuple[TileSpec, str]:
    """Return the tile size and scale, from training or else from the encoder card, and a description of the source."""
    specs = [_find_tiling_settings(member) for member in model_folder.members]
    known = [each for each in specs if each is not None]
    if any(each != known[0] for each in known):
        lines = [f"{member.folder}: {each}" for member, each in zip(model_folder.members, specs, strict=True)]
        raise InputError(
            f"The members of {model_folder.path} were trained with different tiling settings:\n  " + "\n  ".join(lines),
            hint="Predict with each member separately.",
        )
    if known:
        names = {field.name for field in fields(TileSpec)}
        return TileSpec(**{name: value for name, value in known[0].items() if name in names}), "as in training"
    card = find_encoder_card(model_folder.members[0].encoder)
    mpp = card.mpp[0] if card.mpp and _DEFAULT_MPP not in card.mpp else _DEFAULT_MPP
    source = f"the default of {card.name}" if card.mpp else f"the tile size of {card.name} at the default scale"
    reason = f"because the {model_folder.kind} does not record its tiling settings"
    return TileSpec(tile_px=card.tile_px, mpp=mpp), f"{source}, {reason}"


def _find_tiling_settings(member: ModelMember) -> Mapping[str, Any] | None:
    """Return the tiling settings that a member was trained with, or None if they are unknown."""
    if member.config is None:
        return read_export_metadata(member.folder).get("tiles")
    environments = RunFolder(member.folder).read_environments()
    if environments and (spec := environments[0].get("tiles")):
        return dict(spec)
    folder = member.config.tiles.folder
    if folder is None:
        return None
    for slide in member.read_split_rows():
        try:
            return read_slide_tiles(folder, slide["slide_id"]).tiling_settings
        except TapfmError:
            continue
    return None


def find_or_create_tiles(
    requested: RequestedSlides,
    model_folder: ModelFolder,
    tiles: Path | None,
    out: Path,
    *,
    mpp: float | None,
    workers: int,
    pool: WorkerPool | None = None,
    console: Console,
) -> TiledSlides:
    """Read the tiles from the folder `tiles`, or else tile the slides; `mpp` is the option --mpp."""
    if tiles is not None:
        tiled = _find_stored_tiles(requested, tiles, {})
        if warning := _describe_scale_difference(tiled, model_folder):
            console.print(warning, style="bold yellow", markup=False, soft_wrap=True)
        return tiled
    spec, origin = _choose_tile_spec(model_folder)
    console.print(
        f"Tile size: {spec.tile_px} px at {spec.mpp:g} µm per pixel ({origin}).", markup=False, soft_wrap=True
    )
    if spec.edge_tiles == "pad":
        console.print(
            f"Tiles that extend past the right or bottom edge are padded with white ({origin}).",
            markup=False,
            soft_wrap=True,
        )
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
        mpp_option=mpp,
    )
    if mpp is not None and table.finished:
        sources = [each.mpp_source for each in table.finished]
        console.print(describe_mpp_option(mpp, sources), markup=False, soft_wrap=True)
        _print_mpp_warnings(table.finished, out, console)
    failed = {
        each.slide_id: Failure(each.reason, adapt_hint(_explain_tiling_options(each.hint), mpp), stage="tiles")
        for each in table.failed
    }
    return _find_stored_tiles(requested, out, failed)


def describe_mpp_option(mpp: float, sources: Sequence[str | None]) -> str:
    """Return for how many slides --mpp is used, and where the others have their scale from."""
    used, total = sources.count(MPP_OPTION), format_count(len(sources), "slide")
    others = Counter(each or "tiles" for each in sources if each != MPP_OPTION)
    counts = ", ".join(f"{count:,} from the {source}" for source, count in others.items())
    if not used:
        return f"{MPP_OPTION} {mpp:g} is used for none of {total}; they keep their scale: {counts}."
    kept = f" The others keep their scale: {counts}." if others else ""
    return f"{MPP_OPTION} {mpp:g} is used for {used:,} of {total}, without a usable scale of their own.{kept}"


def _print_mpp_warnings(records: Sequence[TilingRecord], folder: Path, console: Console) -> None:
    """Print the warnings of slides that --mpp is used for, such as an implausible value in the file."""
    warned = [each for each in records if each.mpp_source == MPP_OPTION and each.warnings]
    lines = [f"{each.slide_id}: {each.warnings}" for each in warned[:_MAX_WARNINGS]]
    if len(warned) > _MAX_WARNINGS:
        lines.append(
            f"... and {len(warned) - _MAX_WARNINGS:,} more, see the column warnings of {folder / SUMMARY_FILE}"
        )
    for line in lines:
        console.print(line, style="bold yellow", markup=False, soft_wrap=True)


def adapt_hint(hint: str, mpp: float | None) -> str:
    """If a hint is about a slide without a usable scale, add the option --mpp."""
    if hint != SCALE_HINT or mpp is not None:
        return hint
    same = f"If all such slides have the same scale, add it to the command, for example {MPP_OPTION} 0.25 --resume. "
    return f"{same}Otherwise: {hint}"


def _explain_tiling_options(hint: str) -> str:
    """If a hint has options of `tapfm tile`, add this: `tapfm predict` lacks them, or they mean something else."""
    if not _TILING_OPTION.search(hint):
        return hint
    return f"{hint.rstrip('.')}. These are options of tapfm tile: run it with them, then predict with --tiles."


def _describe_scale_difference(tiled: TiledSlides, model_folder: ModelFolder) -> str:
    """Return a warning if tiles are wider or narrower in µm than those used in training, or else an empty string."""
    training_um = [
        each["tile_px"] * each["mpp"]
        for member in model_folder.members
        if (each := _find_tiling_settings(member)) is not None
    ]
    for slide in tiled.slides:
        tiles = slide.tiles
        if tiles is None or tiles.target_mpp is None:
            continue  # unknown scale
        side_um = tiles.tile_px * tiles.target_mpp
        if other := [each for each in training_um if abs(side_um / each - 1) > _SCALE_TOLERANCE]:
            return (
                f"Tiles of {slide.row.slide_id} are {side_um:g} µm wide, but the model was trained on tiles of "
                f"{other[0]:g} µm. Predictions at another scale are unreliable. Omit --tiles to tile the slides again."
            )
    return ""


def _find_stored_tiles(requested: RequestedSlides, folder: Path, failed: Mapping[str, Failure]) -> TiledSlides:
    """Read the tiles of each slide from a folder; slides without tiles there are added to the failures."""
    found, all_failed = [], dict(failed)
    for slide in requested.slides:
        if slide.row.slide_id in failed:
            continue
        try:
            found.append(replace(slide, tiles=read_slide_tiles(folder, slide.row.slide_id)))
        except TapfmError as error:
            all_failed[slide.row.slide_id] = Failure(error.message, error.hint, stage="tiles")
    if not found and not failed:
        raise CohortError(
            f"{folder} has no readable tiles for any of {format_count(len(requested.slides), 'slide')}.",
            hint="Pass the output folder of tapfm tile for these slides, or omit --tiles to tile them now.",
        )
    return TiledSlides(tuple(found), all_failed)

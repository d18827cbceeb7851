"""Slides that the estimates are for: those of a run, of a cohort table, or of the paper's cohort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tapfm.bench.time_estimates import TileCounts
from tapfm.cohort.cohort_table import read_cohort
from tapfm.cohort.splits import TEST, TRAIN, VALIDATION, read_splits
from tapfm.cohort.table_options import TableOptions
from tapfm.config.settings import RunConfig
from tapfm.errors import CohortError, InputError, TapfmError
from tapfm.runs.data import read_run_data
from tapfm.runtime.messages import format_command
from tapfm.tiles.store import TileSet, read_slide_tiles

SlideSource = Literal["run", "cohort", "paper"]
_PAPER_SLIDES = {TRAIN: 1624, VALIDATION: 203, TEST: 203}  # BLCA: 2,030 patients with one slide each, split 80/10/10
PAPER_TILES = 10_000  # per slide; an assumption, because the paper does not state the number
_SPLIT_FRACTIONS = {TRAIN: 0.8, VALIDATION: 0.1, TEST: 0.1}  # if the table has no splits
_MAX_FILES = 3  # slides to read tiles from


@dataclass(frozen=True)
class SlideFile:
    """A slide and its tiles."""

    path: Path
    tiles: TileSet


@dataclass(frozen=True)
class BenchSlides:
    """Number of tiles of each slide, by split, and some slide files to read tiles from."""

    source: SlideSource
    tiles_by_split: Mapping[str, Sequence[int]]  # one number per slide
    files: tuple[SlideFile, ...]
    slides_without_tiles: int = 0

    @property
    def count(self) -> int:
        """Number of slides."""
        return sum(map(len, self.tiles_by_split.values()))

    @property
    def mean_tiles(self) -> int:
        """Mean number of tiles per slide."""
        return round(sum(map(sum, self.tiles_by_split.values())) / self.count)


def slides_from_paper() -> BenchSlides:
    """Return the paper's bladder cancer (BLCA) cohort, without slide files."""
    return BenchSlides("paper", {split: [PAPER_TILES] * count for split, count in _PAPER_SLIDES.items()}, ())


def slides_from_run(config: RunConfig) -> BenchSlides:
    """Return the slides of a run. Raise `InputError` if the run cannot be measured."""
    if config.adaptation.method == "fixed":
        raise InputError(
            "This run uses stored features (adaptation.method = fixed). It does not read slides or run the encoder.",
            hint='Measure a run with adaptation.method = "tapfm" or "finetune".',
        )
    data = read_run_data(config)
    files = {
        slide.row.slide_id: SlideFile(slide.row.path, slide.tiles) for slide in data.slides if slide.tiles is not None
    }
    slide_tiles = [(slide.split, len(files[slide.row.slide_id].tiles)) for slide in data.slides]
    return BenchSlides("run", _group_by_split(slide_tiles), _select_evenly(list(files.values())), len(data.failed))


def slides_from_cohort(table: Path, tiles: Path, slides_folder: Path | None = None) -> BenchSlides:
    """Return the slides of a cohort table that have tiles.

    If any slide has a split, slides without one are not counted. If none has, the paper's fractions are used.
    """
    cohort = read_cohort(table, TableOptions(slides=slides_folder))
    splits = read_splits(cohort) if any(row.split for row in cohort.rows) else None
    rows = [row for row in cohort.rows if splits is None or row.slide_id in splits]
    files: dict[str, SlideFile] = {}
    for row in rows:
        try:
            files[row.slide_id] = SlideFile(row.path, read_slide_tiles(tiles, row.slide_id))
        except TapfmError:
            continue  # counted in slides_without_tiles
    if not files:
        slides_option: tuple[str | Path, ...] = () if slides_folder is None else ("--slides", slides_folder)
        raise CohortError(
            f"No slide {'with a split ' if splits is not None else ''}in {table} has tiles in {tiles}.",
            hint=f"To create them: {format_command('tile', table, *slides_option, '--out', tiles)}",
        )
    if splits is None:
        slide_tiles = _assign_splits([len(file.tiles) for file in files.values()])
    else:
        slide_tiles = [(splits[name], len(file.tiles)) for name, file in files.items()]
    return BenchSlides(
        "cohort", _group_by_split(slide_tiles), _select_evenly(list(files.values())), len(rows) - len(files)
    )


def _assign_splits(tiles: Sequence[int]) -> list[tuple[str, int]]:
    """Assign slides to splits with the paper's fractions. Return (split, tiles) pairs."""
    validation, test = (round(_SPLIT_FRACTIONS[split] * len(tiles)) for split in (VALIDATION, TEST))
    splits = [TRAIN] * (len(tiles) - validation - test) + [VALIDATION] * validation + [TEST] * test
    return list(zip(splits, tiles, strict=True))


def _group_by_split(slide_tiles: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    return {split: [tiles for each, tiles in slide_tiles if each == split] for split in _SPLIT_FRACTIONS}


def _select_evenly(files: Sequence[SlideFile]) -> tuple[SlideFile, ...]:
    """Return some slides at even distances in the table, because neighbours may be from the same scanner."""
    if len(files) <= _MAX_FILES:
        return tuple(files)
    return tuple(files[round(i * (len(files) - 1) / (_MAX_FILES - 1))] for i in range(_MAX_FILES))


def count_tiles(slides: BenchSlides, config: RunConfig) -> TileCounts:
    """Count the tiles that training with this configuration processes."""

    def tiles(split: str, tiles_per_slide: int | str) -> int:
        limit = tiles_per_slide if isinstance(tiles_per_slide, int) else None
        return sum(each if limit is None else min(each, limit) for each in slides.tiles_by_split[split])

    return TileCounts(
        training_tiles=tiles(TRAIN, config.adaptation.tiles_per_slide),
        validation_tiles=tiles(VALIDATION, config.selection.validation_tiles),
        final_prediction_tiles=tiles(VALIDATION, "all") + tiles(TEST, "all"),
        epochs=config.schedule.epochs,
        slide_tiles=slides.mean_tiles,
    )


def count_slides(slides: BenchSlides) -> dict[str, int]:
    """Return the number of slides of each split."""
    return {split: len(tiles) for split, tiles in slides.tiles_by_split.items()}

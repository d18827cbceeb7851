"""Whose slides the measurements are for: those of a run, of a cohort's table, or of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tapfm.bench.expectations import TileCounts
from tapfm.cohort.cohort_table import read_cohort
from tapfm.cohort.splits import TEST, TRAIN, VALIDATION, read_splits
from tapfm.config.settings import RunConfig
from tapfm.errors import CohortError, InputError, TapfmError
from tapfm.runs.data import read_run_data
from tapfm.runtime.messages import format_command
from tapfm.tiles.store import TileSet, find_tiles

SlideSource = Literal["run", "cohort", "paper"]
_PAPER_SLIDES = {TRAIN: 1624, VALIDATION: 203, TEST: 203}  # BLCA: 2,030 patients, a slide of each, 80/10/10
PAPER_TILES = 10_000  # of a slide; the paper does not say how many it has
_SHARES = {TRAIN: 0.8, VALIDATION: 0.1, TEST: 0.1}  # where a table has no splits
_READ_FROM = 3  # slides


@dataclass(frozen=True)
class SlideFile:
    """A slide and its tiles."""

    path: Path
    tiles: TileSet


@dataclass(frozen=True)
class BenchSlides:
    """How many tiles the slides of each split have, and a few of the slides to read from."""

    source: SlideSource
    tiles_of: Mapping[str, Sequence[int]]  # by split: of each slide
    files: tuple[SlideFile, ...]
    without_tiles: int = 0

    @property
    def count(self) -> int:
        """How many slides there are."""
        return sum(map(len, self.tiles_of.values()))

    @property
    def mean_tiles(self) -> int:
        """How many tiles a slide has, on average."""
        return round(sum(map(sum, self.tiles_of.values())) / self.count)


def slides_of_paper() -> BenchSlides:
    """Take the paper's larger task of one target; there is nothing to read from."""
    return BenchSlides("paper", {split: [PAPER_TILES] * count for split, count in _PAPER_SLIDES.items()}, ())


def slides_of_run(config: RunConfig) -> BenchSlides:
    """Take what a run would learn from; all that can be wrong with its data is told."""
    if config.adaptation.method == "fixed":
        raise InputError(
            "This run learns from stored features: it neither reads slides nor runs the encoder.",
            hint='Measure a run with adaptation.method = "tapfm" or "finetune"; making features is encoding.',
        )
    data = read_run_data(config)
    files = {
        slide.row.slide_id: SlideFile(slide.row.path, slide.tiles) for slide in data.slides if slide.tiles is not None
    }
    of_slides = [(slide.split, len(files[slide.row.slide_id].tiles)) for slide in data.slides]
    return BenchSlides("run", _by_split(of_slides), _spread(list(files.values())), len(data.failed))


def slides_of_cohort(table: Path, tiles: Path, slides_folder: Path | None = None) -> BenchSlides:
    """Take the slides of a table that have tiles; without splits in the table they are shared out as in the paper."""
    cohort = read_cohort(table, slides_folder)
    files: dict[str, SlideFile] = {}
    for row in cohort.rows:
        try:
            files[row.slide_id] = SlideFile(row.path, find_tiles(tiles, row.slide_id))
        except TapfmError:
            continue  # counted
    if not files:
        raise CohortError(
            f"No slide of {table} has tiles in {tiles}.",
            hint=f"Make them: {format_command('tile', table, '--out', tiles)}",
        )
    if any(row.split for row in cohort.rows):
        splits = read_splits(cohort)
        of_slides = [(splits[name], len(file.tiles)) for name, file in files.items() if name in splits]
    else:
        of_slides = _share_out([len(file.tiles) for file in files.values()])
    return BenchSlides("cohort", _by_split(of_slides), _spread(list(files.values())), len(cohort.rows) - len(files))


def _share_out(tiles: Sequence[int]) -> list[tuple[str, int]]:
    """Give each slide a split, as many as the paper's shares say."""
    validation, test = (round(_SHARES[split] * len(tiles)) for split in (VALIDATION, TEST))
    splits = [TRAIN] * (len(tiles) - validation - test) + [VALIDATION] * validation + [TEST] * test
    return list(zip(splits, tiles, strict=True))


def _by_split(of_slides: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    """Sort numbers of tiles by split."""
    return {split: [tiles for each, tiles in of_slides if each == split] for split in _SHARES}


def _spread(files: Sequence[SlideFile]) -> tuple[SlideFile, ...]:
    """Choose a few slides from all over the table: neighbours may come from one scanner."""
    if len(files) <= _READ_FROM:
        return tuple(files)
    return tuple(files[round(i * (len(files) - 1) / (_READ_FROM - 1))] for i in range(_READ_FROM))


def work_of(slides: BenchSlides, config: RunConfig) -> TileCounts:
    """Count the tiles that a training goes through, as its configuration says."""

    def tiles(split: str, most: int | str) -> int:
        limit = most if isinstance(most, int) else None
        return sum(each if limit is None else min(each, limit) for each in slides.tiles_of[split])

    return TileCounts(
        training_tiles=tiles(TRAIN, config.adaptation.tiles_per_slide),
        validation_tiles=tiles(VALIDATION, config.selection.validation_tiles),
        held_out_tiles=tiles(VALIDATION, "all") + tiles(TEST, "all"),
        epochs=config.schedule.epochs,
        slide_tiles=slides.mean_tiles,
    )


def in_splits(slides: BenchSlides) -> dict[str, int]:
    """Count the slides of each split."""
    return {split: len(tiles) for split, tiles in slides.tiles_of.items()}

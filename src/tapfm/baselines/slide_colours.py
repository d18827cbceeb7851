"""Colour statistics of slides, read once and cached in a table that several evaluations can share."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from tapfm.encoders.features import FEATURES_VERSION
from tapfm.errors import InputError, Interrupted
from tapfm.runs.data import RunSlide
from tapfm.runtime.csv_files import csv_line
from tapfm.runtime.files import fingerprint, raise_if_disk_full
from tapfm.runtime.progress import SlideProgress
from tapfm.tiles.colour_statistics import COLOUR_STATISTICS, COLOURS_VERSION, colour_histograms, colour_statistics
from tapfm.tiles.reading import TileRequest
from tapfm.tiles.sampling import sample_tiles
from tapfm.tiles.stream import TileStream

_TILES = 64  # sampled from each slide
_COLUMNS = ("slide_id", "key", *COLOUR_STATISTICS)

Colours = Mapping[str, Sequence[float]]  # by `colours_key` of a slide


def read_colours(
    slides: Sequence[RunSlide],
    table: Path,
    *,
    workers: int,
    console: Console,
    stop_signal: Callable[[], int | None],
) -> dict[str, Sequence[float]]:
    """Return the colour statistics of slides by key, without unreadable slides. Raises Interrupted."""
    statistics_by_key = load_or_create_colour_table(table)
    by_key = {colours_key(slide): slide for slide in slides if slide.tiles is not None}
    todo = {key: slide for key, slide in by_key.items() if key not in statistics_by_key}
    if todo:
        with (
            TileStream([_build_tile_request(key, slide) for key, slide in todo.items()], workers=workers) as stream,
            SlideProgress(console, "reading colours", slides=len(todo)) as progress,
        ):
            for read in stream:
                key = read.request.slide_id
                if len(read.pixels):
                    statistics_by_key[key] = statistics = colour_statistics(colour_histograms(read.pixels))
                    _append_row(table, [todo[key].row.slide_id, key, *map(repr, statistics)])
                progress.finish_slide(todo[key].row.slide_id, tiles=len(read.pixels))
                if (number := stop_signal()) is not None:
                    raise Interrupted(number)
    return {key: statistics_by_key[key] for key in by_key if key in statistics_by_key}


def colours_key(slide: RunSlide) -> str:
    """Return a fingerprint of everything that the colours of a slide depend on."""
    assert slide.tiles is not None
    # slide_files_digest: another cohort may have a slide with the same id
    inputs = (slide.row.slide_id, slide.slide_files_digest, slide.tiles.content_digest, _TILES)
    return fingerprint(*inputs, COLOURS_VERSION, FEATURES_VERSION)[:16]


def _build_tile_request(key: str, slide: RunSlide) -> TileRequest:
    """Return a request for a random sample of the tiles of a slide, which is the same in every evaluation.

    The request has the key instead of the slide_id, as two cohorts may have the same ids.
    """
    assert slide.tiles is not None
    sampled = sample_tiles(len(slide.tiles), _TILES, "colours", slide.row.slide_id)
    positions = slide.tiles.positions[np.asarray(sampled)]
    return TileRequest(key, slide.row.path, positions, slide.tiles.side_px0, slide.tiles.tile_px)


def _read_colour_table(table: Path) -> dict[str, Sequence[float]]:
    """Return the statistics in the table, without truncated rows. A last row without a line break is truncated."""
    if not table.exists():
        return {}
    try:
        header, *lines = table.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{table} cannot be read ({error}).", hint="Choose another file with --colours.") from error
    if header and header.split(",") != list(_COLUMNS):
        raise InputError(f"{table} is not a table of colour statistics.", hint="Choose another file with --colours.")
    statistics_by_key: dict[str, Sequence[float]] = {}
    for line in lines[:-1]:
        try:
            row = next(csv.reader([line]))  # one line at a time: a truncated row may end in an open quote
            _, key, *statistics = row
            if len(row) == len(_COLUMNS):
                statistics_by_key[key] = [float(text) for text in statistics]
        except ValueError:
            continue
    return statistics_by_key


def load_or_create_colour_table(table: Path) -> dict[str, Sequence[float]]:
    """Return the statistics in the table. Creates a missing table, and marks a truncated last row as invalid."""
    statistics_by_key = _read_colour_table(table)
    content = table.read_bytes() if table.exists() else b""
    if not content:
        _append_text(table, ",".join(_COLUMNS) + "\n")
    elif not content.endswith(b"\n"):  # the additional cell marks the row as invalid
        _append_text(table, ",truncated\n" if b"\n" in content else "\n")
    return statistics_by_key


def _append_row(table: Path, fields: Sequence[str]) -> None:
    _append_text(table, csv_line(fields) + "\n")


def _append_text(table: Path, text: str) -> None:
    try:
        table.parent.mkdir(parents=True, exist_ok=True)
        with table.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise_if_disk_full(error, table)
        raise InputError(
            f"{table} cannot be written ({error.strerror}).", hint="Choose another file with --colours."
        ) from error

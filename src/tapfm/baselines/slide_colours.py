"""The colours of slides, read once and kept in a table that several evaluations may share."""

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
from tapfm.runtime.files import fingerprint, refuse_full_disk
from tapfm.runtime.progress import SlideProgress
from tapfm.tiles.colours import COLOUR_STATISTICS, COLOURS_VERSION, colour_statistics, histograms_of
from tapfm.tiles.reading import TileRequest
from tapfm.tiles.sampling import draw_tiles
from tapfm.tiles.stream import TileStream

_TILES = 64  # of a slide, drawn once
_COLUMNS = ("slide_id", "key", *COLOUR_STATISTICS)

Colours = Mapping[str, Sequence[float]]  # by `key_of` a slide


def read_colours(
    slides: Sequence[RunSlide],
    table: Path,
    *,
    workers: int,
    console: Console,
    asked_to_stop: Callable[[], int | None],
) -> dict[str, Sequence[float]]:
    """Give the colour statistics of slides with tiles, by their keys; one that cannot be read has none."""
    known = open_colour_table(table)
    by_key = {colours_key(slide): slide for slide in slides if slide.tiles is not None}
    todo = {key: slide for key, slide in by_key.items() if key not in known}
    if todo:
        with (
            TileStream([_request_of(key, slide) for key, slide in todo.items()], workers=workers) as stream,
            SlideProgress(console, f"colours of {_TILES} tiles", slides=len(todo)) as progress,
        ):
            for read in stream:
                key = read.request.slide_id
                if len(read.pixels):
                    known[key] = statistics = colour_statistics(histograms_of(read.pixels))
                    _add_line(table, [todo[key].row.slide_id, key, *map(repr, statistics)])
                progress.finish_slide(todo[key].row.slide_id, tiles=len(read.pixels))
                if (number := asked_to_stop()) is not None:
                    raise Interrupted(number)
    return {key: known[key] for key in by_key if key in known}


def colours_key(slide: RunSlide) -> str:
    """Return the key of a slide's colours: it covers everything that decides them."""
    assert slide.tiles is not None
    # the files: another cohort may have a slide of this name
    made_of = (slide.row.slide_id, slide.files_digest, slide.tiles.content_digest, _TILES)
    return fingerprint(*made_of, COLOURS_VERSION, FEATURES_VERSION)[:16]


def _request_of(key: str, slide: RunSlide) -> TileRequest:
    """Draw the tiles whose colours count, the same ones in every evaluation; two cohorts may share a slide_id."""
    assert slide.tiles is not None
    drawn = draw_tiles(len(slide.tiles), _TILES, "colours", slide.row.slide_id)
    positions = slide.tiles.positions[np.asarray(drawn)]
    return TileRequest(key, slide.row.path, positions, slide.tiles.side_px0, slide.tiles.tile_px)


def _remembered(table: Path) -> dict[str, Sequence[float]]:
    """Recall what was read before; a line that was cut off does not count."""
    if not table.exists():
        return {}
    try:
        header, *lines = table.read_text("utf-8").splitlines() or [""]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{table} cannot be read ({error}).", hint="Give another file to --colours.") from error
    if header and header.split(",") != list(_COLUMNS):
        raise InputError(f"{table} is no table of colours.", hint="Give another file to --colours.")
    known: dict[str, Sequence[float]] = {}
    for line in csv.reader(line for line in lines if line):
        try:
            known[line[1]] = [float(text) for text in line[2:]] if len(line) == len(_COLUMNS) else []
        except ValueError:
            continue
    return {key: statistics for key, statistics in known.items() if statistics}


def open_colour_table(table: Path) -> dict[str, Sequence[float]]:
    """Recall what was read before, or write the names of the columns where there is no table yet."""
    known = _remembered(table)
    if not table.exists() or not table.stat().st_size:
        _add_text(table, ",".join(_COLUMNS))
    return known


def _add_line(table: Path, fields: Sequence[str]) -> None:
    """Remember one more slide."""
    _add_text(table, "\n" + csv_line(fields))  # a line before that was cut off stays alone


def _add_text(table: Path, text: str) -> None:
    """Add to the table."""
    try:
        table.parent.mkdir(parents=True, exist_ok=True)
        with table.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        refuse_full_disk(error, table)
        raise InputError(
            f"{table} cannot be written ({error.strerror}).", hint="Give another file to --colours."
        ) from error

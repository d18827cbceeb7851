"""Heatmaps, galleries and GeoJSON of a predicted slide, in the slide's folder."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.gallery import draw_gallery
from tapfm.prediction.geojson import write_geojson
from tapfm.prediction.heatmap import MAX_SIDE_PX, draw_heatmap
from tapfm.prediction.heatmap_tiff import write_heatmap_tiff
from tapfm.prediction.layers import Layer, Values, main_layers
from tapfm.prediction.tile_squares import check_same_slide
from tapfm.prediction.tile_table import TILES_PARQUET, TileTable, read_tile_table
from tapfm.runtime.files import write_atomically
from tapfm.slides.opening import open_slide

_GEOJSON = "tiles.geojson"
_MAX_WITH_PERCENTILES = 6  # main layers; with more, percentile heatmaps are not drawn, to limit the number of files


@dataclass(frozen=True)
class _HeatmapRequest:
    """A layer to draw, as values or percentiles."""

    layer: Layer
    percentile: bool


def write_slide_outputs(predicted: PredictedSlide, folder: Path, *, heatmaps: bool, geojson: bool) -> list[Path]:
    """Write the requested outputs into the slide's folder, which has its tiles.parquet. Returns the files."""
    table = read_tile_table(folder / TILES_PARQUET)
    written: list[Path] = []
    if geojson:
        written.append(folder / _GEOJSON)
        write_geojson(written[-1], predicted, table)
    if not heatmaps:
        return written
    names = _name_files(_select_heatmaps(_drop_redundant_weights(predicted.layers, table)))
    for each, name in names.items():  # a TIFF does not need the slide file, which may have moved
        written.append(folder / f"heatmap-{name}.tif")
        write_heatmap_tiff(written[-1], predicted, table, each.layer, percentile=each.percentile)
    with closing(open_slide(predicted.path)) as slide:
        check_same_slide(slide.metadata, predicted)
        thumbnail = slide.thumbnail(MAX_SIDE_PX)
        for each, name in names.items():
            written.append(folder / f"heatmap-{name}.png")
            sheet = draw_heatmap(thumbnail, predicted, table, each.layer, percentile=each.percentile)
            write_atomically(written[-1], sheet)
            if not each.percentile:  # percentiles have the same highest and lowest tiles
                written.append(folder / f"gallery-{name}.png")
                write_atomically(written[-1], draw_gallery(slide, predicted, table, each.layer))
    return written


def _select_heatmaps(layers: Sequence[Layer]) -> list[_HeatmapRequest]:
    """Return the heatmaps to draw: the main layers, and the tile weights and attention that all targets share."""
    if not layers:
        return []
    main = main_layers(layers)
    shared = [layer for layer in layers if layer.kind in ("weight", "attention") and layer.target is None]
    chosen = [*main, *(layer for layer in shared if layer not in main)]
    return [
        _HeatmapRequest(layer, percentile)
        for layer in chosen
        for percentile in (False, True)[: 1 if len(main) > _MAX_WITH_PERCENTILES else 2]
    ]


def _drop_redundant_weights(layers: Sequence[Layer], table: TileTable) -> list[Layer]:
    """Return the layers without the tile weights if these rank the tiles as the raw attention does."""
    redundant = {"attention", "weight"} <= table.values.keys() and _has_same_ranking(
        table.values["weight"], table.values["attention"]
    )
    return [layer for layer in layers if not (redundant and layer.column == "weight")]


def _has_same_ranking(weights: Values, attention: Values) -> bool:
    """Return whether weights never decrease with attention, up to float32 rounding."""
    return bool(np.all(np.diff(weights[np.argsort(attention)]) >= -1e-6 * weights.max(initial=0)))


def _name_files(requests: Sequence[_HeatmapRequest]) -> dict[_HeatmapRequest, str]:
    """Return a unique file name per heatmap, ignoring case. Names that would clash get a digest."""
    plain = {each: f"{each.layer.file_name}{_suffix(each)}" for each in requests}
    uses = Counter(name.casefold() for name in plain.values())
    return {
        each: name if uses[name.casefold()] == 1 else f"{each.layer.file_name}-{_digest(each.layer)}{_suffix(each)}"
        for each, name in plain.items()
    }


def _suffix(each: _HeatmapRequest) -> str:
    return "-percentile" if each.percentile else ""


def _digest(layer: Layer) -> str:
    return hashlib.sha256(layer.column.encode()).hexdigest()[:8]

"""All pictures of a predicted slide, in the slide's own folder."""

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
from tapfm.prediction.heatmap import LONGEST_PX, draw_heatmap
from tapfm.prediction.heatmap_tiff import write_heatmap_tiff
from tapfm.prediction.layers import Layer, Values, main_layers
from tapfm.prediction.placing import refuse_other_slide
from tapfm.prediction.tile_table import NAME as TILES
from tapfm.prediction.tile_table import TileTable, read_tile_table
from tapfm.runtime.files import write_atomically
from tapfm.slides.opening import open_slide

_GEOJSON = "tiles.geojson"
_FEW = 6  # main layers; of more than these no map of percentiles is drawn: three files for each target are enough


@dataclass(frozen=True)
class _HeatmapRequest:
    """A layer to draw, by its values or by their percentiles."""

    layer: Layer
    percentile: bool


def draw_slide(predicted: PredictedSlide, folder: Path, *, heatmaps: bool, geojson: bool) -> list[Path]:
    """Draw what was asked for into the slide's own folder, where its tiles.parquet is; gives the files."""
    table = read_tile_table(folder / TILES)
    written: list[Path] = []
    if geojson:
        written.append(folder / _GEOJSON)
        write_geojson(written[-1], predicted, table)
    if not heatmaps:
        return written
    names = _names_of(_maps_of(_telling(predicted.layers, table)))
    for each, name in names.items():  # these need no slide: it may have moved
        written.append(folder / f"heatmap-{name}.tif")
        write_heatmap_tiff(written[-1], predicted, table, each.layer, percentile=each.percentile)
    with closing(open_slide(predicted.path)) as slide:
        refuse_other_slide(slide.facts, predicted)
        thumbnail = slide.thumbnail(LONGEST_PX)
        for each, name in names.items():
            written.append(folder / f"heatmap-{name}.png")
            sheet = draw_heatmap(thumbnail, predicted, table, each.layer, percentile=each.percentile)
            write_atomically(written[-1], sheet)
            if not each.percentile:  # the same tiles are at the ends of both
                written.append(folder / f"gallery-{name}.png")
                write_atomically(written[-1], draw_gallery(slide, predicted, table, each.layer))
    return written


def _maps_of(layers: Sequence[Layer]) -> list[_HeatmapRequest]:
    """Choose what is drawn: the kind that says most, for each target, and where the model looked."""
    if not layers:
        return []
    main = main_layers(layers)
    looked = [layer for layer in layers if layer.kind in ("weight", "attention") and layer.target is None]
    chosen = [*main, *(layer for layer in looked if layer not in main)]
    return [
        _HeatmapRequest(layer, percentile)
        for layer in chosen
        for percentile in (False, True)[: 1 if len(main) > _FEW else 2]
    ]


def _telling(layers: Sequence[Layer], table: TileTable) -> list[Layer]:
    """Leave the weights out where they say what the encoder's attention says; most aggregators make their own."""
    same = {"attention", "weight"} <= table.values.keys() and _follows(
        table.values["weight"], table.values["attention"]
    )
    return [layer for layer in layers if not (same and layer.column == "weight")]


def _follows(weights: Values, attention: Values) -> bool:
    """Say whether a tile of more attention has more weight; what float32 rounds off does not count."""
    return bool(np.all(np.diff(weights[np.argsort(attention)]) >= -1e-6 * weights.max(initial=0)))


def _names_of(maps: Sequence[_HeatmapRequest]) -> dict[_HeatmapRequest, str]:
    """Name the files of each map; targets that would share a name, in capitals or not, get a digest of their own."""
    plain = {each: f"{each.layer.file_name}{_suffix(each)}" for each in maps}
    uses = Counter(name.casefold() for name in plain.values())
    return {
        each: name if uses[name.casefold()] == 1 else f"{each.layer.file_name}-{_digest(each.layer)}{_suffix(each)}"
        for each, name in plain.items()
    }


def _suffix(each: _HeatmapRequest) -> str:
    """Tell maps of percentiles from maps of values."""
    return "-percentile" if each.percentile else ""


def _digest(layer: Layer) -> str:
    """Digest the name of a column."""
    return hashlib.sha256(layer.column.encode()).hexdigest()[:8]

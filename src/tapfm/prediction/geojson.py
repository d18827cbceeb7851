"""Tiles as QuPath opens them: squares with measurements, in level-0 pixels counted from the corner of the bounds."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.layers import Layer, layer_values, main_layers, palette, percentiles
from tapfm.prediction.tile_table import TileTable
from tapfm.runtime.files import open_replacement

_TENTH = 10.0  # percent of tiles at either end that get a class of their own
_Classification = dict[str, Any]


def write_geojson(path: Path, predicted: PredictedSlide, table: TileTable) -> None:
    """Write the tiles, one to a line; the same prediction gives the same bytes."""
    with open_replacement(path) as file:
        file.write(b'{"type":"FeatureCollection","features":[')
        for number, feature in enumerate(_features_of(predicted, table)):
            file.write(b",\n" if number else b"\n")
            file.write(json.dumps(feature, separators=(",", ":"), allow_nan=False).encode())
        file.write(b"\n]}\n")


def _features_of(predicted: PredictedSlide, table: TileTable) -> Iterator[dict[str, Any]]:
    """Make one feature after the other, so that a hundred thousand need no memory."""
    columns = dict(table.values)
    main = main_layers(predicted.layers)
    columns |= {f"{layer.column} percentile": percentiles(table.values[layer.column]) for layer in main}
    classes = _classes_of(table, main[0]) if main else {}
    corner = predicted.bounds.x_px0, predicted.bounds.y_px0
    for row, (x_px0, y_px0) in enumerate(table.positions.tolist()):
        measurements = {name: float(values[row]) for name, values in columns.items()}
        properties: dict[str, Any] = {
            "objectType": "tile",
            "isLocked": True,
            # JSON has no NaN; QuPath shows what is missing as such
            "measurements": {name: value for name, value in measurements.items() if math.isfinite(value)},
        }
        if (classification := classes.get(row)) is not None:
            properties["classification"] = classification
        yield {
            "type": "Feature",
            "id": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{predicted.slide_id}/tile/{x_px0}/{y_px0}")),
            "geometry": {
                "type": "Polygon",
                "coordinates": [_square(x_px0 - corner[0], y_px0 - corner[1], predicted.side_px0)],
            },
            "properties": properties,
        }


def _square(x: int, y: int, side: int) -> list[list[int]]:
    """Go around a square and back to where it began."""
    return [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]


def _classes_of(table: TileTable, layer: Layer) -> dict[int, _Classification]:
    """Give the tenth of the tiles at either end a class, in the colours of the map, to find them in QuPath."""
    values = table.values[layer.column]
    colours = palette(diverging=layer_values(values, layer.kind)[1].diverging)
    high = {"name": f"{layer.title}: highest tenth", "color": colours[-1].tolist()}
    low = {"name": f"{layer.title}: lowest tenth", "color": colours[0].tolist()}
    places = percentiles(values)
    return {
        row: high if place >= 100 - _TENTH else low
        for row, place in enumerate(places.tolist())
        if not _TENTH < place < 100 - _TENTH
    }

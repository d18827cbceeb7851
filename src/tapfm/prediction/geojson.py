"""GeoJSON for QuPath: tiles as squares with measurements, in level-0 pixels from the corner of the bounds."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.layers import Layer, layer_values, main_layers, palette, percentiles
from tapfm.prediction.tile_table import TileTable
from tapfm.runtime.files import open_atomically

_EXTREME_PERCENT = 10.0  # percentage of tiles that get a class in QuPath: the highest values, and the lowest
_Classification = dict[str, Any]


def write_geojson(path: Path, predicted: PredictedSlide, table: TileTable) -> None:
    """Write one feature per tile and line. The output is deterministic."""
    with open_atomically(path) as file:
        file.write(b'{"type":"FeatureCollection","features":[')
        for number, feature in enumerate(_iter_features(predicted, table)):
            file.write(b",\n" if number else b"\n")
            file.write(json.dumps(feature, separators=(",", ":"), allow_nan=False).encode())
        file.write(b"\n]}\n")


def _iter_features(predicted: PredictedSlide, table: TileTable) -> Iterator[dict[str, Any]]:
    """Yield one feature per tile, to bound memory."""
    columns = dict(table.values)
    if table.padded is not None:
        columns["padded"] = table.padded.astype(np.float64)  # QuPath measurements are numbers
    main = main_layers(predicted.layers)
    columns |= {f"{layer.column} percentile": percentiles(table.values[layer.column]) for layer in main}
    classes = _classify_extremes(table, main[0]) if main else {}
    corner = predicted.bounds.x_px0, predicted.bounds.y_px0
    for row, (x_px0, y_px0) in enumerate(table.positions.tolist()):
        measurements = {name: float(values[row]) for name, values in columns.items()}
        properties: dict[str, Any] = {
            "objectType": "tile",
            "isLocked": True,
            # JSON has no NaN; QuPath shows missing measurements as NaN
            "measurements": {name: value for name, value in measurements.items() if math.isfinite(value)},
        }
        if (classification := classes.get(row)) is not None:
            properties["classification"] = classification
        yield {
            "type": "Feature",
            "id": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{predicted.slide_id}/tile/{x_px0}/{y_px0}")),
            "geometry": {
                "type": "Polygon",
                "coordinates": [_square_ring(x_px0 - corner[0], y_px0 - corner[1], predicted.side_px0)],
            },
            "properties": properties,
        }


def _square_ring(x: int, y: int, side: int) -> list[list[int]]:
    """Return the closed ring of a square."""
    return [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]


def _classify_extremes(table: TileTable, layer: Layer) -> dict[int, _Classification]:
    """Return a QuPath class for the 10% of tiles with the highest values and the 10% with the lowest, by row."""
    values = table.values[layer.column]
    colours = palette(diverging=layer_values(values, layer.kind)[1].diverging)
    high = {"name": f"{layer.title}: highest 10%", "color": colours[-1].tolist()}
    low = {"name": f"{layer.title}: lowest 10%", "color": colours[0].tolist()}
    ranks = percentiles(values)
    return {
        row: high if rank >= 100 - _EXTREME_PERCENT else low
        for row, rank in enumerate(ranks.tolist())
        if not _EXTREME_PERCENT < rank < 100 - _EXTREME_PERCENT
    }

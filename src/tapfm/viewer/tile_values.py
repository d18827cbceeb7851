"""Tile values for the page: descriptions of the layers, and the values of all tiles in a binary format.

The binary format is: the length of a JSON header as little-endian uint32, the header, padding to a multiple of 4 bytes,
then the columns one after another. The first two columns are x and y as int32, in level-0 pixels from the corner of the
slide, not of its bounds. Then each layer has two float32 columns: its values and their percentiles.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapfm.prediction.layers import ColourScale, Layer, layer_values, palette, percentiles
from tapfm.prediction.tile_table import TileTable


def describe_layer(layer: Layer, table: TileTable) -> dict[str, Any]:
    """Return a layer as JSON, with the colour scales of its values and of its percentiles."""
    values = table.values[layer.column]
    _, scale = layer_values(values, layer.kind)
    _, percentile_scale = layer_values(values, layer.kind, percentile=True)
    return {
        "column": layer.column,
        "kind": layer.kind,
        "target": layer.target,
        "title": layer.title,
        "scale": _describe_scale(scale),
        "percentile_scale": _describe_scale(percentile_scale),
    }


def _describe_scale(scale: ColourScale) -> dict[str, Any]:
    return {**asdict(scale), "ticks": scale.ticks()}


def colour_palettes() -> dict[str, list[list[int]]]:
    """Return the colours of sequential and diverging scales."""
    return {
        "sequential": palette(diverging=False).tolist(),
        "diverging": palette(diverging=True).tolist(),
    }


def pack_tile_values(table: TileTable, layers: list[Layer]) -> bytes:
    """Encode positions, values and percentiles of all tiles in the binary format."""
    columns: list[tuple[str, NDArray[Any]]] = [
        ("x", table.positions[:, 0].astype("<i4")),
        ("y", table.positions[:, 1].astype("<i4")),
    ]
    for layer in layers:
        values = table.values[layer.column]
        columns.append((layer.column, values.astype("<f4")))
        columns.append((f"percentile.{layer.column}", percentiles(values).astype("<f4")))
    header = json.dumps({"count": len(table), "columns": [name for name, _ in columns]}).encode()
    header_length = np.array([len(header)], "<u4").tobytes()
    padding = b" " * (-(len(header_length) + len(header)) % 4)
    return b"".join([header_length, header, padding, *(column.tobytes() for _, column in columns)])

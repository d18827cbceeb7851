"""What the page is told of tiles: the layers that can be drawn, and the numbers of all tiles as one block of bytes.

The block is: the length of a JSON header as a little-endian uint32, the header, padding to a multiple of 4, then the
columns one after the other: x and y as int32 (level-0 pixels, padding outside the bounds included), then for each
layer its values and their percentiles as float32.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapfm.prediction.layers import ColourScale, Layer, layer_values, palette, percentiles
from tapfm.prediction.tile_table import TileTable


def describe(layer: Layer, table: TileTable) -> dict[str, Any]:
    """Say what a layer is and how both of its maps are coloured."""
    values = table.values[layer.column]
    _, scale = layer_values(values, layer.kind)
    _, percentile_scale = layer_values(values, layer.kind, percentile=True)
    return {
        "column": layer.column,
        "kind": layer.kind,
        "target": layer.target,
        "title": layer.title,
        "scale": _as_json(scale),
        "percentile_scale": _as_json(percentile_scale),
    }


def _as_json(scale: ColourScale) -> dict[str, Any]:
    """Write a scale for the page."""
    return {**asdict(scale), "ticks": scale.ticks()}


def palettes() -> dict[str, list[list[int]]]:
    """Give the colours of both kinds of scales."""
    return {
        "sequential": palette(diverging=False).tolist(),
        "diverging": palette(diverging=True).tolist(),
    }


def pack(table: TileTable, layers: list[Layer]) -> bytes:
    """Write the numbers of all tiles."""
    columns: list[tuple[str, NDArray[Any]]] = [
        ("x", table.positions[:, 0].astype("<i4")),
        ("y", table.positions[:, 1].astype("<i4")),
    ]
    for layer in layers:
        values = table.values[layer.column]
        columns.append((layer.column, values.astype("<f4")))
        columns.append((f"percentile.{layer.column}", percentiles(values).astype("<f4")))
    header = json.dumps({"count": len(table), "columns": [name for name, _ in columns]}).encode()
    start = np.array([len(header)], "<u4").tobytes()
    padding = b" " * (-(len(start) + len(header)) % 4)
    return b"".join([start, header, padding, *(column.tobytes() for _, column in columns)])

"""Heatmap of a slide as a pyramidal TIFF for OpenSlide and QuPath."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.layers import ColourScale, Layer, Values, layer_values
from tapfm.prediction.tile_squares import TileSquares, place_tiles
from tapfm.prediction.tile_table import TileTable
from tapfm.runtime.files import open_atomically
from tapfm.slides.slide import WHITE, Pixels

_TILE_ON_HEATMAP_PX = 32  # approximate; keeps the files of large slides small
_BLOCK_PX = 256
_MAX_LAST_LEVEL_PX = 1024  # longer side of the smallest level, at most


def write_heatmap_tiff(
    path: Path, predicted: PredictedSlide, table: TileTable, layer: Layer, *, percentile: bool = False
) -> None:
    """Write the heatmap of the slide's bounds, white where there is no tile. Memory is bounded by one row of blocks."""
    import tifffile

    values, scale = layer_values(table.values[layer.column], layer.kind, percentile=percentile)
    downsample = _choose_downsample(predicted)
    bounds = predicted.bounds
    width_px, height_px = (-(-length // downsample) for length in (bounds.width_px0, bounds.height_px0))
    metadata = {
        "created_by": "tapfm predict",
        "slide_id": predicted.slide_id,
        "layer": layer.column,
        "title": layer.title,
        "percentile": percentile,
        "unit": scale.unit,
        "low": scale.low,
        "high": scale.high,
        "downsample": downsample,
        "bounds_corner_px0": [bounds.x_px0, bounds.y_px0],
    }
    with open_atomically(path) as file, tifffile.TiffWriter(file) as writer:
        for level, (columns, rows) in enumerate(_level_sizes(width_px, height_px)):
            level_downsample = downsample * 2**level
            squares = place_tiles(predicted, table.positions, (level_downsample, level_downsample), columns, rows)
            pixels_per_cm = 10_000 / (predicted.mpp * level_downsample)
            writer.write(
                _iter_blocks(squares, values, scale),
                shape=(rows, columns, 3),
                dtype=np.uint8,
                tile=(_BLOCK_PX, _BLOCK_PX),
                photometric="rgb",
                compression="zlib",
                resolution=(pixels_per_cm, pixels_per_cm),
                resolutionunit="CENTIMETER",
                subfiletype=int(level > 0),  # 1: reduced resolution
                description=json.dumps(metadata) if level == 0 else None,
                metadata=None,
                software=False,
            )


def _choose_downsample(predicted: PredictedSlide) -> int:
    """Return the number of level-0 pixels per heatmap pixel."""
    return max(1, round(predicted.side_px0 / _TILE_ON_HEATMAP_PX))


def _level_sizes(width_px: int, height_px: int) -> list[tuple[int, int]]:
    """Return the sizes of the levels, halved until the longer side has at most `_MAX_LAST_LEVEL_PX`."""
    sizes = [(width_px, height_px)]
    while max(sizes[-1]) > _MAX_LAST_LEVEL_PX:
        sizes.append((-(-sizes[-1][0] // 2), -(-sizes[-1][1] // 2)))
    return sizes


def _iter_blocks(squares: TileSquares, values: Values, scale: ColourScale) -> Iterator[Pixels]:
    """Yield the blocks of a level in row-major order."""
    for top_px in range(0, squares.height_px, _BLOCK_PX):
        means, covered = squares.rasterise(values, top_px, _BLOCK_PX)
        padded_px = -(-squares.width_px // _BLOCK_PX) * _BLOCK_PX
        row = np.full((_BLOCK_PX, padded_px, 3), WHITE, np.uint8)
        row[:, : squares.width_px][covered] = scale.colours(means[covered])
        for left_px in range(0, padded_px, _BLOCK_PX):
            yield row[:, left_px : left_px + _BLOCK_PX]

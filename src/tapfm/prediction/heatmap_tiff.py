"""A map of a slide as a pyramid that OpenSlide and QuPath open beside the slide or over it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.layers import ColourScale, Layer, Values, layer_values
from tapfm.prediction.placing import TileSquares, place
from tapfm.prediction.tile_table import TileTable
from tapfm.runtime.files import open_replacement
from tapfm.slides.slide import WHITE, Pixels

_TILE_ON_MAP_PX = 32  # about: enough to tell tiles from each other, and a large slide stays small
_BLOCK_PX = 256
_LARGEST_LAST_PX = 1024  # no level is smaller than it has to be


def write_heatmap_tiff(
    path: Path, predicted: PredictedSlide, table: TileTable, layer: Layer, *, percentile: bool = False
) -> None:
    """Write the map of the slide's bounds; white where there is no tile. Memory is that of a row of blocks."""
    import tifffile

    values, scale = layer_values(table.values[layer.column], layer.kind, percentile=percentile)
    downsample = _downsample_of(predicted)
    bounds = predicted.bounds
    width_px, height_px = (-(-length // downsample) for length in (bounds.width_px0, bounds.height_px0))
    about = {
        "made_by": "tapfm predict",
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
    with open_replacement(path) as file, tifffile.TiffWriter(file) as writer:
        for number, (columns, rows) in enumerate(_level_sizes(width_px, height_px)):
            shrink = downsample * 2**number
            squares = place(predicted, table.positions, (shrink, shrink), columns, rows)
            pixels_per_cm = 10_000 / (predicted.mpp * shrink)
            writer.write(
                _blocks_of(squares, values, scale),
                shape=(rows, columns, 3),
                dtype=np.uint8,
                tile=(_BLOCK_PX, _BLOCK_PX),
                photometric="rgb",
                compression="zlib",
                resolution=(pixels_per_cm, pixels_per_cm),
                resolutionunit="CENTIMETER",
                subfiletype=int(number > 0),  # 1: the same picture, smaller
                description=json.dumps(about) if number == 0 else None,
                metadata=None,
                software=False,
            )


def _downsample_of(predicted: PredictedSlide) -> int:
    """Say how many level-0 pixels a pixel of the map is wide."""
    return max(1, round(predicted.side_px0 / _TILE_ON_MAP_PX))


def _level_sizes(width_px: int, height_px: int) -> list[tuple[int, int]]:
    """Halve until the longer side has at most `_LARGEST_LAST_PX`."""
    sizes = [(width_px, height_px)]
    while max(sizes[-1]) > _LARGEST_LAST_PX:
        sizes.append((-(-sizes[-1][0] // 2), -(-sizes[-1][1] // 2)))
    return sizes


def _blocks_of(squares: TileSquares, values: Values, scale: ColourScale) -> Iterator[Pixels]:
    """Paint the map, block by block from the top left."""
    for top_px in range(0, squares.height_px, _BLOCK_PX):
        means, painted = squares.paint(values, top_px, _BLOCK_PX)
        across = -(-squares.width_px // _BLOCK_PX) * _BLOCK_PX
        row = np.full((_BLOCK_PX, across, 3), WHITE, np.uint8)
        row[:, : squares.width_px][painted] = scale.colours(means[painted])
        for left_px in range(0, across, _BLOCK_PX):
            yield row[:, left_px : left_px + _BLOCK_PX]

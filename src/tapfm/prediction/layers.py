"""Layers of a heatmap: the tile values that can be shown, their units and their colours.

PNG, TIFF, GeoJSON, report and viewer all use this module, so a colour has the same meaning everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapfm.inference.tile_columns import TileColumn, column_name

Values = NDArray[np.float64]  # one per tile

# Version of heatmaps, galleries and GeoJSON. Increase it when the same prediction is drawn differently; files of an
# older version are then written again. tests/versions/ fails when the output changes and this number does not.
DRAWING_VERSION = 3

_TITLES: dict[TileColumn, str] = {
    "attention": "raw attention",
    "weight": "tile weight",
    "contribution": "contribution to the logit",
    "score": "aggregator score",
}
UNITS: dict[TileColumn, str] = {
    "attention": "mean attention from the CLS token to the patch tokens",
    "weight": "fraction; the weights of all tiles sum to 1",
    "contribution": "logit (log-odds)",
    "score": "arbitrary, depends on the aggregator",
}
_PERCENTILE_UNIT = "percentile among the tiles of this slide"
# Colours end at these percentiles: otherwise a few outliers would leave one colour for all other tiles.
_CLIP_PERCENTILES = (1.0, 99.0)
# Blue to red through light grey, equally dark at both ends; dark violet to yellow. Both are safe for colour blindness.
_DIVERGING = ((33, 72, 158), (106, 152, 208), (228, 228, 228), (224, 130, 100), (160, 24, 40))
_SEQUENTIAL = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


@dataclass(frozen=True)
class Layer:
    """A column of tiles.parquet that can be drawn. `target` is None if all targets share the column."""

    column: str
    kind: TileColumn
    target: str | None = None

    @property
    def title(self) -> str:
        """Description of the layer, with its target."""
        return _TITLES[self.kind] + (f" for {self.target}" if self.target is not None else "")

    @property
    def file_name(self) -> str:
        """Part of file names, with the target's name without special characters."""
        return self.kind + (f"-{_slug(self.target)}" if self.target is not None else "")


@dataclass(frozen=True)
class ColourScale:
    """Range and unit of a colour scale. A diverging scale has 0 in the middle."""

    low: float
    high: float
    unit: str
    diverging: bool = False

    def fractions(self, values: Values) -> Values:
        """Return the position of each value on the scale, clipped to 0..1."""
        return np.asarray(np.clip((values - self.low) / (self.high - self.low), 0, 1))

    def colours(self, values: Values) -> NDArray[np.uint8]:
        """Return the colour of each value, (n, 3)."""
        return palette(diverging=self.diverging)[np.rint(self.fractions(values) * 255).astype(int)]

    def ticks(self) -> list[float]:
        """Return four to eight round values for the colour bar."""
        step = _round_step_down((self.high - self.low) / 4)
        multiples = range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
        return [multiple * step for multiple in multiples]


def layer_values(values: Values, kind: TileColumn, *, percentile: bool = False) -> tuple[Values, ColourScale]:
    """Return the values or percentiles that a heatmap shows, and their colour scale."""
    if percentile:
        return percentiles(values), ColourScale(0, 100, _PERCENTILE_UNIT)
    if not len(values):
        return values, ColourScale(0, 1, UNITS[kind])
    low, high = np.percentile(values, _CLIP_PERCENTILES)
    if kind == "contribution" or (kind == "score" and low < 0 < high):
        end = max(abs(float(low)), abs(float(high))) or 1.0
        return values, ColourScale(-end, end, UNITS[kind], diverging=True)
    if not high > low:  # one tile, or all equal
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    return values, ColourScale(float(low), float(high), UNITS[kind])


def percentiles(values: Values) -> Values:
    """Return the percentile rank of each value, 0 to 100. Equal values have the mean of their ranks."""
    ordered = np.sort(values)
    below, up_to = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return np.asarray((below + up_to) / 2 / len(values) * 100)


def _round_step_down(step: float) -> float:
    """Round down to 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return max(each for each in (1, 2, 2.5, 5, 10) if each * power <= step * (1 + 1e-9)) * power


def palette(*, diverging: bool) -> NDArray[np.uint8]:
    """Return the 256 colours of a scale, (256, 3)."""
    anchors = np.array(_DIVERGING if diverging else _SEQUENTIAL, float)
    positions = np.linspace(0, len(anchors) - 1, 256)
    return np.stack([np.rint(np.interp(positions, np.arange(len(anchors)), each)) for each in anchors.T], 1).astype(
        "u1"
    )


def _slug(name: str) -> str:
    """Return a name without the characters that file systems may reject."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "target"


def list_layers(columns: Sequence[str], targets: Sequence[str]) -> list[Layer]:
    """Return the layers of a tile table, the most informative kind (contributions) first."""
    order: tuple[TileColumn, ...] = ("contribution", "score", "weight", "attention")
    every = [Layer(column_name(kind, target), kind, target) for kind in order for target in (None, *targets)]
    return [layer for layer in every if layer.column in columns]


def main_layers(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers of the most informative kind: one, or one per target."""
    return [layer for layer in layers if layer.kind == layers[0].kind]

"""The numbers that a map of a slide can show: what each is, in which unit, and which colour a value has.

Every map, PNG or TIFF or viewer, asks here, so that a colour means the same everywhere and every colour bar can say
what it shows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapfm.inference.tile_columns import TileColumn, column_name

Values = NDArray[np.float64]  # one for each tile

# Version of heatmaps, galleries and GeoJSON. Increase it when the same prediction is drawn differently; pictures of an
# older version are then drawn again. tests/versions/ fails when the output changes and this number does not.
DRAWING_VERSION = 1

_TITLES: dict[TileColumn, str] = {
    "attention": "raw attention of the encoder",
    "weight": "weight in the slide",
    "contribution": "contribution to the logit",
    "score": "score of the aggregator",
}
UNITS: dict[TileColumn, str] = {
    "attention": "mean attention of CLS to patch tokens",
    "weight": "share of the slide, sum over tiles 1",
    "contribution": "logit, what the tile gives to it",
    "score": "as the aggregator scores tiles",
}
_PERCENTILE_UNIT = "percentile among the slide's tiles"
# A few tiles far from all others would leave one colour to the rest: values beyond these share the end's colour.
_ENDS = (1.0, 99.0)
# blue to red through a light grey, equally dark at both ends; dark violet to yellow. Both are told apart by people who
# see colours differently.
_DIVERGING = ((33, 72, 158), (106, 152, 208), (228, 228, 228), (224, 130, 100), (160, 24, 40))
_SEQUENTIAL = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


@dataclass(frozen=True)
class Layer:
    """A column of tiles.parquet that can be drawn; `target` is None where all targets share it."""

    column: str
    kind: TileColumn
    target: str | None = None

    @property
    def title(self) -> str:
        """Say what it is."""
        return _TITLES[self.kind] + (f" of {self.target}" if self.target is not None else "")

    @property
    def file_name(self) -> str:
        """Name files by it; what a file system may not like in a target's name is left out."""
        return self.kind + (f"-{_slug(self.target)}" if self.target is not None else "")


@dataclass(frozen=True)
class ColourScale:
    """From which value to which colours run, what the numbers are, and whether the middle is 0."""

    low: float
    high: float
    unit: str
    diverging: bool = False

    def fractions(self, values: Values) -> Values:
        """Give each value its place between the ends, 0 to 1."""
        return np.asarray(np.clip((values - self.low) / (self.high - self.low), 0, 1))

    def colours(self, values: Values) -> NDArray[np.uint8]:
        """Give each value its colour, (n, 3)."""
        return palette(diverging=self.diverging)[np.rint(self.fractions(values) * 255).astype(int)]

    def ticks(self) -> list[float]:
        """Give round values between the ends for the colour bar, four to nine of them."""
        step = _round_step((self.high - self.low) / 4)
        places = range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
        return [place * step for place in places]


def layer_values(values: Values, kind: TileColumn, *, percentile: bool = False) -> tuple[Values, ColourScale]:
    """Give the numbers that a map shows and their colour scale: the values themselves, or their percentiles."""
    if percentile:
        return percentiles(values), ColourScale(0, 100, _PERCENTILE_UNIT)
    if not len(values):
        return values, ColourScale(0, 1, UNITS[kind])
    low, high = np.percentile(values, _ENDS)
    if kind == "contribution" or (kind == "score" and low < 0 < high):
        end = max(abs(float(low)), abs(float(high))) or 1.0
        return values, ColourScale(-end, end, UNITS[kind], diverging=True)
    if not high > low:  # one tile, or all the same
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    return values, ColourScale(float(low), float(high), UNITS[kind])


def percentiles(values: Values) -> Values:
    """Say which part of the tiles, in percent, has less; equal values share the middle of their places."""
    ordered = np.sort(values)
    below, up_to = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return np.asarray((below + up_to) / 2 / len(values) * 100)


def _round_step(about: float) -> float:
    """Find the next of 1, 2, 2.5, 5 times a power of ten, not above `about`, to step from tick to tick."""
    power = 10.0 ** math.floor(math.log10(about))
    return max(each for each in (1, 2, 2.5, 5, 10) if each * power <= about * (1 + 1e-9)) * power


def palette(*, diverging: bool) -> NDArray[np.uint8]:
    """Give the 256 colours of a scale, (256, 3)."""
    anchors = np.array(_DIVERGING if diverging else _SEQUENTIAL, float)
    places = np.linspace(0, len(anchors) - 1, 256)
    return np.stack([np.rint(np.interp(places, np.arange(len(anchors)), each)) for each in anchors.T], 1).astype("u1")


def _slug(name: str) -> str:
    """Make a part of a file name of a target's name."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "target"


def layers_of(columns: Sequence[str], targets: Sequence[str]) -> list[Layer]:
    """List what the columns of a table can show, the contributions first: they say most."""
    order: tuple[TileColumn, ...] = ("contribution", "score", "weight", "attention")
    every = [Layer(column_name(kind, target), kind, target) for kind in order for target in (None, *targets)]
    return [layer for layer in every if layer.column in columns]


def main_layers(layers: Sequence[Layer]) -> list[Layer]:
    """Choose the layers of the kind that says most, one for each target where targets differ."""
    return [layer for layer in layers if layer.kind == layers[0].kind]

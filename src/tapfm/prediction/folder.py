"""The output folder of `tapfm predict`, which report and viewer read.

DIR/prediction.json               model, targets and call thresholds
DIR/predictions.csv               one row per slide and target
DIR/failures.csv                  failed slides and slides with unreadable tiles, with the reasons
DIR/per-slide/ID/slide.json       properties and predictions of the slide; written when the slide is finished
DIR/per-slide/ID/tiles.parquet    position and values of each tile
DIR/per-slide/ID/...              heatmaps, galleries and GeoJSON, if requested
DIR/tiles/                        tiles of the slides, without --tiles
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tapfm.errors import InputError
from tapfm.evaluation.predictions import few_tiles_warning
from tapfm.prediction.layers import Layer, list_layers
from tapfm.prediction.tile_table import TILES_PARQUET, TileTable, read_tile_table
from tapfm.runtime.files import write_atomically
from tapfm.slides.opening import PER_SLIDE
from tapfm.slides.slide import Box
from tapfm.tasks.catalog import ClassTexts, target_kinds
from tapfm.tasks.target import Label, TargetKinds

PREDICTION_JSON = "prediction.json"  # marks a prediction folder
PREDICTIONS_CSV = "predictions.csv"
SLIDE_JSON = "slide.json"


@dataclass(frozen=True)
class TargetPrediction:
    """Prediction of one target of a slide."""

    logit: float
    probability: float
    threshold: float | None  # of the probability; None if validation gave none
    call: Label  # predicted class at the threshold
    label: Label  # of the cohort table; None if unknown
    constant: float | None  # logit = constant + sum of the tiles' contributions; None without them or for an ensemble


@dataclass(frozen=True)
class PredictedSlide:
    """A predicted slide. Tile positions are level-0 pixels from the top left corner of the slide, not of its bounds."""

    slide_id: str
    patient_id: str
    cohort: str | None
    split: str | None
    path: Path  # of the slide's file when it was predicted
    width_px0: int
    height_px0: int
    bounds: Box
    mpp: float
    side_px0: int  # of a tile
    tile_px: int
    columns: tuple[str, ...]  # of tiles.parquet, without x and y
    targets: Mapping[str, TargetPrediction]
    tiles: int
    tiles_failed: int
    seconds: float
    key: str  # fingerprint of the weights, the tiles and the slide's files
    mpp_source: str | None = None  # cohort table, file, objective, --mpp or tiles; None if unknown
    labels: ClassTexts = field(default_factory=dict)  # texts of the classes of targets whose labels are not 0 and 1

    @property
    def warning(self) -> str:
        """Why the predictions are unreliable, for example "only 7 tiles"; empty if there is no reason."""
        return few_tiles_warning(self.tiles)

    @property
    def kinds(self) -> TargetKinds:
        return target_kinds(self.targets, self.labels)

    @property
    def layers(self) -> list[Layer]:
        """The layers that can be drawn."""
        return list_layers(self.columns, list(self.targets))

    def write(self, folder: Path) -> None:
        """Write slide.json into the slide's folder."""
        text = json.dumps(asdict(self) | {"warning": self.warning}, indent=2, default=str)
        write_atomically(folder / SLIDE_JSON, f"{text}\n".encode())

    @classmethod
    def read(cls, folder: Path) -> PredictedSlide:
        """Read slide.json from the slide's folder."""
        path = folder / SLIDE_JSON
        try:
            found = json.loads(path.read_text("utf-8"))
            found.pop("warning", None)  # computed from the number of tiles
            targets = {target: TargetPrediction(**each) for target, each in found.pop("targets").items()}
            bounds, file, columns = Box(**found.pop("bounds")), Path(found.pop("path")), tuple(found.pop("columns"))
            return cls(**found, bounds=bounds, path=file, columns=columns, targets=targets)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path} cannot be read ({error}).", hint="Predict the slide again with tapfm predict."
            ) from error


@dataclass(frozen=True)
class PredictionFolder:
    """An output folder of `tapfm predict`."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether this is a prediction folder. It may have no finished slides yet."""
        return (self.path / PREDICTION_JSON).is_file()

    def read_metadata(self) -> dict[str, Any]:
        """Read prediction.json: tapfm, model, kind, members, targets, encoder, aggregator, calls, ..."""
        try:
            return dict(json.loads((self.path / PREDICTION_JSON).read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                f"{self.path} is not a prediction folder ({error}).",
                hint="Create one: tapfm predict --model runs/NAME SLIDE... --out DIR",
            ) from error

    def slide_folder(self, slide_id: str) -> Path:
        return self.path / PER_SLIDE / slide_id

    def slides(self) -> list[PredictedSlide]:
        """Read the finished slides, sorted by id."""
        found = sorted((self.path / PER_SLIDE).glob(f"*/{SLIDE_JSON}"))
        return [PredictedSlide.read(path.parent) for path in found]

    def tiles(self, slide_id: str) -> TileTable:
        """Read the tile table of a slide."""
        return read_tile_table(self.slide_folder(slide_id) / TILES_PARQUET)

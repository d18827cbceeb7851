"""The folder that `tapfm predict` writes, and what report and viewer read from it.

DIR/prediction.json               which model, which targets, where the thresholds come from
DIR/predictions.csv               a line for each slide and target
DIR/failures.csv                  slides without a prediction, and why
DIR/per-slide/ID/slide.json       the slide's facts and numbers; is written when the slide is done
DIR/per-slide/ID/tiles.parquet    its tiles
DIR/per-slide/ID/...              pictures, where they were asked for
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tapfm.errors import InputError
from tapfm.prediction.layers import Layer, layers_of
from tapfm.prediction.tile_table import NAME as TILES
from tapfm.prediction.tile_table import TileTable, read_tile_table
from tapfm.runtime.files import write_atomically
from tapfm.slides.opening import PER_SLIDE
from tapfm.slides.slide import Box
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.target import Label, TargetKinds

ABOUT = "prediction.json"  # marks a folder of predictions
TABLE = "predictions.csv"
SLIDE = "slide.json"


@dataclass(frozen=True)
class TargetPrediction:
    """What the model says of one target of a slide."""

    logit: float
    probability: float
    threshold: float | None  # of the probability; None where validation gave none
    call: Label  # what the target is called by the threshold
    label: Label  # where the table has one
    constant: float | None  # logit = constant + sum of the tiles' contributions; None where there are none


@dataclass(frozen=True)
class PredictedSlide:
    """A slide that was predicted. Positions of tiles are those of level 0, padding outside the bounds included."""

    slide_id: str
    patient_id: str
    cohort: str | None
    split: str | None
    path: Path  # of the slide itself, which may have moved since
    width_px0: int
    height_px0: int
    bounds: Box
    mpp: float
    side_px0: int  # of a tile
    tile_px: int
    columns: tuple[str, ...]  # of tiles.parquet, besides x and y
    targets: Mapping[str, TargetPrediction]
    tiles: int
    tiles_failed: int
    seconds: float
    key: str  # fingerprint of the weights, the tiles and the slide's files that made it

    @property
    def kinds(self) -> TargetKinds:
        """The kinds of the targets."""
        return target_kinds(self.targets)

    @property
    def layers(self) -> list[Layer]:
        """What can be drawn."""
        return layers_of(self.columns, list(self.targets))

    def write(self, folder: Path) -> None:
        """Write slide.json into the slide's own folder."""
        text = json.dumps(asdict(self), indent=2, default=str)
        write_atomically(folder / SLIDE, f"{text}\n".encode())

    @classmethod
    def read(cls, folder: Path) -> PredictedSlide:
        """Read slide.json from the slide's own folder."""
        path = folder / SLIDE
        try:
            found = json.loads(path.read_text("utf-8"))
            said = {target: TargetPrediction(**each) for target, each in found.pop("targets").items()}
            bounds, file, columns = Box(**found.pop("bounds")), Path(found.pop("path")), tuple(found.pop("columns"))
            return cls(**found, bounds=bounds, path=file, columns=columns, targets=said)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{path} cannot be read ({error}).", hint="Make it again: tapfm predict") from error


@dataclass(frozen=True)
class PredictionFolder:
    """The folder of a prediction."""

    path: Path

    @property
    def begun(self) -> bool:
        """Say whether it is one."""
        return (self.path / ABOUT).is_file()

    def about(self) -> dict[str, Any]:
        """Read prediction.json: tapfm, model, kind, members, targets, encoder, aggregator, thresholds, ..."""
        try:
            return dict(json.loads((self.path / ABOUT).read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                f"{self.path} is no folder of predictions ({error}).",
                hint="Make one: tapfm predict --model runs/NAME SLIDE... --out DIR",
            ) from error

    def folder_of(self, slide_id: str) -> Path:
        """Say where the files of a slide are."""
        return self.path / PER_SLIDE / slide_id

    def slides(self) -> list[PredictedSlide]:
        """Read the slides that are done, in the order of their ids."""
        found = sorted((self.path / PER_SLIDE).glob(f"*/{SLIDE}"))
        return [PredictedSlide.read(path.parent) for path in found]

    def tiles(self, slide_id: str) -> TileTable:
        """Read the tiles of a slide."""
        return read_tile_table(self.folder_of(slide_id) / TILES)

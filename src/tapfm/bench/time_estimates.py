"""Estimate the duration of training and prediction from measured speeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tapfm.runtime.messages import format_count

Bottleneck = Literal["reading", "computing"]


@dataclass(frozen=True)
class TileCounts:
    """Numbers of tiles to process in training and in prediction."""

    training_tiles: int  # per epoch
    validation_tiles: int  # after each epoch
    final_prediction_tiles: int  # all tiles of validation and test slides, once at the end
    epochs: int
    slide_tiles: int  # mean per slide


@dataclass(frozen=True)
class Speeds:
    """Speeds in tiles per second. None if a measurement failed."""

    reading: float | None
    encoding: float | None
    step: float | None


@dataclass(frozen=True)
class TimeEstimate:
    """Estimated duration of a task. `seconds` is None if a speed is missing."""

    task: str
    tiles: int
    seconds: float | None
    bottleneck: Bottleneck | None  # the slower of reading and computing; None if not compared


def estimate_times(tile_counts: TileCounts, speeds: Speeds, *, shared_cores: bool) -> list[TimeEstimate]:
    """Return the durations of an epoch, its validation, the final predictions, the whole training and one prediction.

    A GPU computes while the CPU reads the next tiles, so the slower of the two determines the duration. With
    `shared_cores`, the CPU does both, and the durations are added.
    """

    def estimate(task: str, tiles: int, computing_speed: float | None) -> TimeEstimate:
        if not tiles:
            return TimeEstimate(task, 0, 0.0, None)
        if not computing_speed or not speeds.reading:
            return TimeEstimate(task, tiles, None, None)
        reading_s, computing_s = tiles / speeds.reading, tiles / computing_speed
        seconds = reading_s + computing_s if shared_cores else max(reading_s, computing_s)
        return TimeEstimate(task, tiles, seconds, "reading" if reading_s > computing_s else "computing")

    epoch = estimate("training, per epoch", tile_counts.training_tiles, speeds.step)
    validation = estimate("validation, per epoch", tile_counts.validation_tiles, speeds.encoding)
    final = estimate("validation and test slides, at the end", tile_counts.final_prediction_tiles, speeds.encoding)
    slide = estimate("prediction, per slide", tile_counts.slide_tiles, speeds.encoding)
    tiles = tile_counts.epochs * (epoch.tiles + validation.tiles) + final.tiles
    seconds = None
    if epoch.seconds is not None and validation.seconds is not None and final.seconds is not None:
        seconds = tile_counts.epochs * (epoch.seconds + validation.seconds) + final.seconds
    whole = TimeEstimate(f"whole training, {format_count(tile_counts.epochs, 'epoch')}", tiles, seconds, None)
    return [epoch, validation, final, whole, slide]

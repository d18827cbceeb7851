"""How long work will take, from measured speeds: arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tapfm.runtime.messages import format_count

Bound = Literal["reading", "computing"]


@dataclass(frozen=True)
class TileCounts:
    """What there is to do, in tiles."""

    training_tiles: int  # of one epoch
    validation_tiles: int  # after each epoch
    held_out_tiles: int  # all tiles of validation and test slides, once, when training is over
    epochs: int
    slide_tiles: int  # of one slide, on average


@dataclass(frozen=True)
class Speeds:
    """Tiles per second; None where it could not be measured."""

    reading: float | None
    encoding: float | None
    step: float | None


@dataclass(frozen=True)
class TimeEstimate:
    """How long something will take; None where a speed is missing that it takes."""

    what: str
    tiles: int
    seconds: float | None
    bound: Bound | None  # what takes longer; None where nothing is compared


def expect(work: TileCounts, speeds: Speeds, *, shared_cores: bool) -> list[TimeEstimate]:
    """Say how long an epoch, its validation, a whole training and a slide's prediction take.

    A GPU computes while the cores read, and the slower of the two decides. Where the same cores do both
    (`shared_cores`), their times add up.
    """

    def part(what: str, tiles: int, computing: float | None) -> TimeEstimate:
        if not tiles:
            return TimeEstimate(what, 0, 0.0, None)
        if not computing or not speeds.reading:
            return TimeEstimate(what, tiles, None, None)
        reading_s, computing_s = tiles / speeds.reading, tiles / computing
        seconds = reading_s + computing_s if shared_cores else max(reading_s, computing_s)
        return TimeEstimate(what, tiles, seconds, "reading" if reading_s > computing_s else "computing")

    epoch = part("training, an epoch", work.training_tiles, speeds.step)
    validation = part("validation, an epoch", work.validation_tiles, speeds.encoding)
    held_out = part("held-out slides, at the end", work.held_out_tiles, speeds.encoding)
    slide = part("prediction of a slide", work.slide_tiles, speeds.encoding)
    tiles = work.epochs * (epoch.tiles + validation.tiles) + held_out.tiles
    seconds = None
    if epoch.seconds is not None and validation.seconds is not None and held_out.seconds is not None:
        seconds = work.epochs * (epoch.seconds + validation.seconds) + held_out.seconds
    whole = TimeEstimate(f"the whole training, {format_count(work.epochs, 'epoch')}", tiles, seconds, None)
    return [epoch, validation, held_out, whole, slide]

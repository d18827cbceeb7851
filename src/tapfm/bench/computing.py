"""How fast the device encodes tiles and learns from them, and in how much memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tapfm.adaptation.chunked import Chunking
from tapfm.bench.models import BenchSubject, build_inference_encoder, build_learner, forward_gflop, learn_once
from tapfm.bench.timing import forget_peak, peak_gib, time_repeated, within_memory
from tapfm.encoders.inference import default_batch

Way = Literal["one pass", "chunked"]
_OUT_OF_MEMORY = "out of memory"
_EFFICIENCY = 0.3  # part of the matrix peak that is taken for granted, to choose how many tiles to encode
_STEP_COST = 4.0  # forwards that a step is taken to cost, to choose how many tiles it has
_CHUNK = 64
_MOST_ENCODED = 512
_FEWEST_TILES = 4  # of a step: with fewer it is all overhead
_MOST_TILES = 4096  # of a step, where the recipe takes all tiles of a slide


@dataclass(frozen=True)
class EncodingSpeed:
    """Encoding without a graph, as for validation and prediction."""

    tiles: int
    seconds: float | None
    gflop_per_tile: float
    peak_share: float | None  # of the measured matrix peak
    peak_gib: float | None
    compiling_s: float | None  # how much longer the first time took; None where nothing is compiled
    problem: str | None = None

    @property
    def tiles_per_second(self) -> float | None:
        """Give the speed."""
        return self.tiles / self.seconds if self.seconds else None


@dataclass(frozen=True)
class StepSpeed:
    """One slide's step: forward, backward and both optimisers."""

    way: Way
    scope: str
    tiles: int
    chunk: int | None
    seconds: float | None
    peak_gib: float | None
    compiling_s: float | None
    problem: str | None = None

    @property
    def tiles_per_second(self) -> float | None:
        """Give the speed."""
        return self.tiles / self.seconds if self.seconds else None


def encoding_speed(subject: BenchSubject, matrix_tflops: float, *, budget_s: float) -> EncodingSpeed:
    """Encode as many tiles as take about a second, but no more than a few chunks."""
    gflop = forward_gflop(subject.card)
    in_a_second = int(_EFFICIENCY * matrix_tflops * 1e3 / gflop)
    tiles = min(max(in_a_second, 1), _MOST_ENCODED)

    def measure() -> _Timed:
        encoder = build_inference_encoder(subject)
        pixels, batch = _random_tiles(tiles, subject), default_batch(encoder.encoder)
        return _timed(lambda: encoder.encode(pixels, batch), subject, budget_s=budget_s)

    done = within_memory(measure, subject.device)
    if done is None:
        return EncodingSpeed(tiles, None, gflop, None, None, None, _OUT_OF_MEMORY)
    share = tiles * gflop / done.seconds / (1e3 * matrix_tflops)
    return EncodingSpeed(tiles, done.seconds, gflop, share, done.peak_gib, done.compiling_s)


def step_speed(subject: BenchSubject, way: Way, scope: str, tiles: int, *, budget_s: float) -> StepSpeed:
    """Take steps with tiles of random pixels: copied, augmented, encoded, learnt from."""
    chunk = _chunk_of(subject, tiles) if way == "chunked" else None

    def measure() -> _Timed:
        learner = build_learner(subject, scope, Chunking(chunk))
        pixels = _random_tiles(tiles, subject)
        return _timed(lambda: learn_once(learner, pixels, subject), subject, budget_s=budget_s)

    done = within_memory(measure, subject.device)
    if done is None:
        return StepSpeed(way, scope, tiles, chunk, None, None, None, _OUT_OF_MEMORY)
    return StepSpeed(way, scope, tiles, chunk, done.seconds, done.peak_gib, done.compiling_s)


@dataclass(frozen=True)
class _Timed:
    """A time, and what it took besides."""

    seconds: float
    peak_gib: float | None
    compiling_s: float | None


def _timed(work: Callable[[], object], subject: BenchSubject, *, budget_s: float) -> _Timed:
    """Time work on the device; its peak of memory is that of the repeats."""
    device = subject.device
    timing = time_repeated(work, device, budget_s=budget_s, least=2, before_repeats=lambda: forget_peak(device))
    return _Timed(timing.seconds, peak_gib(device), timing.began_s if subject.compiled else None)


def tiles_of_step(subject: BenchSubject, mean_tiles: int, encoding: EncodingSpeed, *, step_s: float) -> int:
    """Take as many tiles as the recipe does; on a CPU no more than a step of `step_s` has time for."""
    asked = subject.config.adaptation.tiles_per_slide
    tiles = asked if isinstance(asked, int) else min(mean_tiles, _MOST_TILES)
    if subject.device.type == "cpu" and encoding.tiles_per_second is not None:
        tiles = min(tiles, int(step_s * encoding.tiles_per_second / _STEP_COST))
    return max(tiles, _FEWEST_TILES)


def _chunk_of(subject: BenchSubject, tiles: int) -> int:
    """Take the configuration's chunk; else the usual one, or what makes a small bag several chunks."""
    asked = subject.config.adaptation.chunk
    return asked if isinstance(asked, int) else max(1, min(_CHUNK, tiles // 2))


def _random_tiles(tiles: int, subject: BenchSubject) -> Tensor:
    """Make tiles of random pixels, in the host's memory, as they are read."""
    generator, side = torch.Generator().manual_seed(0), subject.card.tile_px
    pixels = torch.randint(0, 256, (tiles, 3, side, side), dtype=torch.uint8, generator=generator)
    return pixels.pin_memory() if subject.device.type == "cuda" else pixels

"""Measure speed and peak memory of encoding and of training steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tapfm.adaptation.chunked import Chunking
from tapfm.bench.models import BenchSetup, build_inference_encoder, build_learner, count_forward_gflop, run_train_step
from tapfm.bench.timing import catch_out_of_memory, peak_gib, reset_peak_memory, time_repeated
from tapfm.encoders.inference import default_batch

StepStrategy = Literal["one pass", "chunked"]
_OUT_OF_MEMORY = "out of memory"
_EFFICIENCY = 0.3  # assumed fraction of the matrix product's speed, to choose the number of tiles to encode
_STEP_COST = 4.0  # assumed cost of a step in forward passes, to choose its number of tiles
_DEFAULT_CHUNK = 64
_MAX_ENCODED_TILES = 512
_MIN_STEP_TILES = 4  # with fewer, a step is mostly overhead
_MAX_STEP_TILES = 4096  # if the recipe uses all tiles of a slide


@dataclass(frozen=True)
class EncodingSpeed:
    """Speed of encoding without a graph, as in validation and prediction."""

    tiles: int
    seconds: float | None
    gflop_per_tile: float
    peak_fraction: float | None  # fraction of the matrix product's speed
    peak_gib: float | None
    compile_s: float | None  # additional time of the first run; None if nothing is compiled
    problem: str | None = None

    @property
    def tiles_per_second(self) -> float | None:
        return self.tiles / self.seconds if self.seconds else None


@dataclass(frozen=True)
class StepSpeed:
    """Speed of a training step for one slide: forward, backward and both optimisers."""

    strategy: StepStrategy
    scope: str
    tiles: int
    chunk: int | None
    seconds: float | None
    peak_gib: float | None
    compile_s: float | None
    problem: str | None = None

    @property
    def tiles_per_second(self) -> float | None:
        return self.tiles / self.seconds if self.seconds else None


def measure_encoding(setup: BenchSetup, matrix_tflops: float, *, budget_s: float) -> EncodingSpeed:
    """Measure encoding with the number of tiles that takes about a second, limited to `_MAX_ENCODED_TILES`."""
    gflop = count_forward_gflop(setup.card)
    tiles_in_a_second = int(_EFFICIENCY * matrix_tflops * 1e3 / gflop)
    tiles = min(max(tiles_in_a_second, 1), _MAX_ENCODED_TILES)

    def measure() -> _Measurement:
        encoder = build_inference_encoder(setup)
        pixels, batch = _random_tiles(tiles, setup), default_batch(encoder.encoder)
        return _time_on_device(lambda: encoder.encode(pixels, batch), setup, budget_s=budget_s)

    measured = catch_out_of_memory(measure, setup.device)
    if measured is None:
        return EncodingSpeed(tiles, None, gflop, None, None, None, _OUT_OF_MEMORY)
    peak_fraction = tiles * gflop / measured.seconds / (1e3 * matrix_tflops)
    return EncodingSpeed(tiles, measured.seconds, gflop, peak_fraction, measured.peak_gib, measured.compile_s)


def measure_step(setup: BenchSetup, strategy: StepStrategy, scope: str, tiles: int, *, budget_s: float) -> StepSpeed:
    """Measure training steps with random pixels, including copying to the device and augmentation."""
    chunk = _choose_chunk(setup, tiles) if strategy == "chunked" else None

    def measure() -> _Measurement:
        learner = build_learner(setup, scope, Chunking(chunk))
        pixels = _random_tiles(tiles, setup)
        return _time_on_device(lambda: run_train_step(learner, pixels, setup), setup, budget_s=budget_s)

    measured = catch_out_of_memory(measure, setup.device)
    if measured is None:
        return StepSpeed(strategy, scope, tiles, chunk, None, None, None, _OUT_OF_MEMORY)
    return StepSpeed(strategy, scope, tiles, chunk, measured.seconds, measured.peak_gib, measured.compile_s)


@dataclass(frozen=True)
class _Measurement:
    """Duration, peak memory and compile time of a function."""

    seconds: float
    peak_gib: float | None
    compile_s: float | None


def _time_on_device(function: Callable[[], object], setup: BenchSetup, *, budget_s: float) -> _Measurement:
    """Time a function on the device. The peak memory is that of the repeats, after the first run."""
    device = setup.device
    timing = time_repeated(
        function, device, budget_s=budget_s, min_repeats=2, before_repeats=lambda: reset_peak_memory(device)
    )
    return _Measurement(timing.seconds, peak_gib(device), timing.warmup_s if setup.compiled else None)


def choose_tiles_per_step(setup: BenchSetup, mean_tiles: int, encoding: EncodingSpeed, *, max_cpu_step_s: float) -> int:
    """Return the number of tiles per step. On a CPU, a step takes at most about `max_cpu_step_s` seconds."""
    configured = setup.config.adaptation.tiles_per_slide
    tiles = configured if isinstance(configured, int) else min(mean_tiles, _MAX_STEP_TILES)
    if setup.device.type == "cpu" and encoding.tiles_per_second is not None:
        tiles = min(tiles, int(max_cpu_step_s * encoding.tiles_per_second / _STEP_COST))
    return max(tiles, _MIN_STEP_TILES)


def _choose_chunk(setup: BenchSetup, tiles: int) -> int:
    """Return the chunk size of the configuration, or a default that splits the bag into at least two chunks."""
    configured = setup.config.adaptation.chunk
    return configured if isinstance(configured, int) else max(1, min(_DEFAULT_CHUNK, tiles // 2))


def _random_tiles(tiles: int, setup: BenchSetup) -> Tensor:
    """Return tiles with random pixels in host memory, pinned if there is a GPU."""
    generator, side = torch.Generator().manual_seed(0), setup.card.tile_px
    pixels = torch.randint(0, 256, (tiles, 3, side, side), dtype=torch.uint8, generator=generator)
    return pixels.pin_memory() if setup.device.type == "cuda" else pixels

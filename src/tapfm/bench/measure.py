"""Run all measurements of `tapfm bench`, and estimate durations from them."""

from __future__ import annotations

import datetime
import json
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tapfm.bench.bench_slides import BenchSlides, count_slides, count_tiles
from tapfm.bench.device_speed import MatrixSpeed, measure_copy_speed, measure_matrix_product
from tapfm.bench.model_speed import (
    EncodingSpeed,
    StepSpeed,
    StepStrategy,
    choose_tiles_per_step,
    measure_encoding,
    measure_step,
)
from tapfm.bench.models import BenchSetup, check_scopes
from tapfm.bench.reading_speed import ReadingSpeed, measure_reading, write_synthetic_slide
from tapfm.bench.time_estimates import Speeds, TileCounts, TimeEstimate, estimate_times
from tapfm.bench.timing import GIB, catch_out_of_memory
from tapfm.errors import InputError
from tapfm.runs.folder import installed_version
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import format_count
from tapfm.runtime.progress import make_progress_bars
from tapfm.runtime.workers import available_cores
from tapfm.version import __version__

_STRATEGIES: tuple[StepStrategy, ...] = ("one pass", "chunked")
_PACKAGES = ("torch", "timm", "numpy", "openslide-python", "tifffile", "imagecodecs")


@dataclass(frozen=True)
class _Budget:
    """Approximate duration of each measurement in seconds, without warm-up, and the longest step on a CPU."""

    device_speed_s: float = 1.0
    reading_s: float = 3.0
    encoding_s: float = 3.0
    steps_s: float = 4.0
    max_cpu_step_s: float = 2.0  # limits the number of tiles of a step on a CPU


_QUICK = _Budget(device_speed_s=0.2, reading_s=0.5, encoding_s=0.5, steps_s=0.5, max_cpu_step_s=0.4)


@dataclass(frozen=True)
class Machine:
    """Hardware and software versions, without host or user name."""

    device: str
    gpu_memory_gib: float | None  # None without a GPU
    cores: int
    system: str
    python: str
    cuda: str | None
    packages: dict[str, str]


@dataclass(frozen=True)
class BenchResult:
    """All measurements and estimates."""

    date: str
    encoder: str
    precision: str
    compiled: bool
    quick: bool
    machine: Machine
    matrix_product: MatrixSpeed
    copy_to_gpu: float | None  # GB/s; None without a GPU
    reading: list[ReadingSpeed]
    encoding: EncodingSpeed
    steps: list[StepSpeed]
    slides: BenchSlides
    tile_counts: TileCounts
    estimates: list[TimeEstimate]

    def as_json(self) -> dict[str, Any]:
        """Return the contents of the JSON file, without paths and slide names."""
        return {
            "tapfm": __version__,
            "date": self.date,
            "encoder": self.encoder,
            "precision": self.precision,
            "compiled": self.compiled,
            "quick": self.quick,
            "machine": asdict(self.machine),
            "matrix_product": asdict(self.matrix_product),
            "copy_to_gpu": None if self.copy_to_gpu is None else {"gb_per_second": self.copy_to_gpu},
            "reading": [_with_speed(replace(row, reason=None)) for row in self.reading],
            "encoding": _with_speed(self.encoding),
            "steps": [_with_speed(row) for row in self.steps],
            "slides": {
                "source": self.slides.source,
                "by_split": count_slides(self.slides),
                "mean_tiles": self.slides.mean_tiles,
                "without_tiles": self.slides.slides_without_tiles,
            },
            "tile_counts": asdict(self.tile_counts),
            "estimates": [asdict(row) for row in self.estimates],
        }


class _StageProgress:
    """Progress bar with the current measurement. Prints lines if there is no terminal."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._progress = console, make_progress_bars(console)
        self._started = 0
        self._bar = self._progress.add_task("", total=total, note="")
        self._progress.start()

    def start_stage(self, name: str) -> None:
        self._progress.update(self._bar, description=name, completed=self._started)
        self._started += 1
        if not self._console.is_terminal:
            self._console.print(f"measuring: {name}", markup=False)

    def close(self) -> None:
        self._progress.stop()


def measure_machine(
    setup: BenchSetup,
    slides: BenchSlides,
    scopes: Sequence[str],
    *,
    workers: int,
    quick: bool,
    console: Console,
) -> BenchResult:
    """Run all measurements and show progress.

    If encoding or a training step runs out of memory, this is recorded as its `problem`. Raises InputError if there is
    not enough memory for the matrix product.
    """
    check_scopes(setup, scopes)
    total = 2 + (not slides.files) + len({1, workers}) + len(_STRATEGIES) * len(scopes)
    with closing(_StageProgress(console, total)) as stages:
        return _measure_all(setup, slides, scopes, workers=workers, quick=quick, start_stage=stages.start_stage)


def _measure_all(
    setup: BenchSetup,
    slides: BenchSlides,
    scopes: Sequence[str],
    *,
    workers: int,
    quick: bool,
    start_stage: Callable[[str], None],
) -> BenchResult:
    budget, device, tile_px = _QUICK if quick else _Budget(), setup.device, setup.card.tile_px
    start_stage("matrix product")
    device_speeds = catch_out_of_memory(
        lambda: (
            measure_matrix_product(device, setup.dtype, budget_s=budget.device_speed_s),
            measure_copy_speed(device, budget_s=budget.device_speed_s),
        ),
        device,
    )
    if device_speeds is None:
        raise InputError(
            f"{device} does not have enough free memory for a matrix product.",
            hint="Check with nvidia-smi whether another program uses it, or choose another device with --device.",
        )
    matrix_product, copy_to_gpu = device_speeds
    with tempfile.TemporaryDirectory(prefix="tapfm-bench-") as folder:
        synthetic = not slides.files
        if synthetic:
            start_stage("generating a slide")
        files = (write_synthetic_slide(Path(folder), tile_px),) if synthetic else slides.files
        reading = []
        for count in dict.fromkeys([1, workers]):  # `workers` last: estimates use the last speed
            start_stage(f"reading, {format_count(count, 'worker')}")
            reading.append(
                measure_reading(files, tile_px, workers=count, budget_s=budget.reading_s, synthetic=synthetic)
            )
    start_stage("encoding")
    encoding = measure_encoding(setup, matrix_product.tflops, budget_s=budget.encoding_s)
    tiles = choose_tiles_per_step(setup, slides.mean_tiles, encoding, max_cpu_step_s=budget.max_cpu_step_s)
    steps = []
    for scope in scopes:
        for strategy in _STRATEGIES:
            start_stage(f"step, {strategy}, {scope}")
            steps.append(measure_step(setup, strategy, scope, tiles, budget_s=budget.steps_s))
    tile_counts = count_tiles(slides, setup.config)
    return BenchResult(
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        encoder=setup.card.key,
        precision=matrix_product.precision,
        compiled=setup.compiled,
        quick=quick,
        machine=_describe_machine(device),
        matrix_product=matrix_product,
        copy_to_gpu=copy_to_gpu,
        reading=reading,
        encoding=encoding,
        steps=steps,
        slides=slides,
        tile_counts=tile_counts,
        estimates=estimate_times(
            tile_counts, _select_speeds(reading, encoding, steps, scopes[0]), shared_cores=device.type == "cpu"
        ),
    )


def _select_speeds(
    reading: Sequence[ReadingSpeed], encoding: EncodingSpeed, steps: Sequence[StepSpeed], scope: str
) -> Speeds:
    """Return the speeds of a run: reading with all workers, and the faster step strategy that fits into memory."""
    step_speeds = [speed for row in steps if row.scope == scope and (speed := row.tiles_per_second) is not None]
    return Speeds(reading[-1].tiles_per_second, encoding.tiles_per_second, max(step_speeds, default=None))


def _describe_machine(device: torch.device) -> Machine:
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Machine(
        device=_processor_name() if gpu is None else gpu.name,
        gpu_memory_gib=None if gpu is None else round(gpu.total_memory / GIB, 1),
        cores=available_cores(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        cuda=None if gpu is None else torch.version.cuda,
        packages={name: version for name in _PACKAGES if (version := installed_version(name)) is not None},
    )


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _with_speed(row: ReadingSpeed | EncodingSpeed | StepSpeed) -> dict[str, Any]:
    return {**asdict(row), "tiles_per_second": row.tiles_per_second}


def write_result(result: BenchResult, path: Path) -> None:
    """Write the result as JSON."""
    try:
        write_atomically(path, (json.dumps(result.as_json(), indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}).", hint="Choose another file with --out."
        ) from error

"""All measurements, one after the other, and what is expected from them."""

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

from tapfm.bench.computing import EncodingSpeed, StepSpeed, Way, encoding_speed, step_speed, tiles_of_step
from tapfm.bench.expectations import Speeds, TileCounts, TimeEstimate, expect
from tapfm.bench.models import BenchSubject, check_scopes
from tapfm.bench.peak import MatrixPeak, copy_speed, matrix_peak
from tapfm.bench.reading import ReadingSpeed, painted_file, reading_speed
from tapfm.bench.slides import BenchSlides, in_splits, work_of
from tapfm.bench.timing import GIB, within_memory
from tapfm.errors import InputError
from tapfm.runs.folder import installed_version
from tapfm.runtime.files import write_atomically
from tapfm.runtime.progress import make_progress_bars
from tapfm.runtime.workers import available_cores
from tapfm.version import __version__

_WAYS: tuple[Way, ...] = ("one pass", "chunked")
_PACKAGES = ("torch", "timm", "numpy", "openslide-python", "tifffile", "imagecodecs")


@dataclass(frozen=True)
class _MeasuringTime:
    """How long to measure, in seconds; each measurement warms up besides."""

    peak_s: float = 1.0
    reading_s: float = 3.0
    encoding_s: float = 3.0
    steps_s: float = 4.0
    step_s: float = 2.0  # of one step on a CPU, about: it decides its number of tiles


_QUICK = _MeasuringTime(peak_s=0.2, reading_s=0.5, encoding_s=0.5, steps_s=0.5, step_s=0.4)


@dataclass(frozen=True)
class Machine:
    """What was measured; nothing that tells whose it is."""

    device: str
    memory_gib: float | None
    cores: int
    system: str
    python: str
    cuda: str | None
    packages: dict[str, str]


@dataclass(frozen=True)
class BenchResult:
    """All that was measured."""

    made_on: str
    encoder: str
    precision: str
    compiled: bool
    quick: bool
    machine: Machine
    matrix: MatrixPeak
    copying: float | None  # GB/s to the GPU
    reading: list[ReadingSpeed]
    encoding: EncodingSpeed
    steps: list[StepSpeed]
    slides: BenchSlides
    work: TileCounts
    expected: list[TimeEstimate]

    def as_json(self) -> dict[str, Any]:
        """Give all figures, without paths and names."""
        return {
            "tapfm": __version__,
            "made_on": self.made_on,
            "encoder": self.encoder,
            "precision": self.precision,
            "compiled": self.compiled,
            "quick": self.quick,
            "machine": asdict(self.machine),
            "matrix": asdict(self.matrix),
            "copying": None if self.copying is None else {"gb_per_second": self.copying},
            "reading": [_with_speed(replace(row, reason=None)) for row in self.reading],
            "encoding": _with_speed(self.encoding),
            "steps": [_with_speed(row) for row in self.steps],
            "slides": {
                "source": self.slides.source,
                "by_split": in_splits(self.slides),
                "mean_tiles": self.slides.mean_tiles,
                "without_tiles": self.slides.without_tiles,
            },
            "work": asdict(self.work),
            "expected": [asdict(row) for row in self.expected],
        }


class _StageProgress:
    """A bar that says what is being measured; lines where no terminal shows it."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._progress = console, make_progress_bars(console)
        self._begun = 0
        self._bar = self._progress.add_task("", total=total, note="")
        self._progress.start()

    def begin(self, what: str) -> None:
        """Tell what comes next; what came before is over."""
        self._progress.update(self._bar, description=what, completed=self._begun)
        self._begun += 1
        if not self._console.is_terminal:
            self._console.print(f"measuring: {what}", markup=False)

    def close(self) -> None:
        """Take the bar off."""
        self._progress.stop()


def measure(
    subject: BenchSubject,
    slides: BenchSlides,
    scopes: Sequence[str],
    *,
    workers: int,
    quick: bool,
    console: Console,
) -> BenchResult:
    """Measure everything, saying what is being measured. What memory does not suffice for is told in its place."""
    check_scopes(subject, scopes)
    total = 2 + (not slides.files) + len({1, workers}) + len(_WAYS) * len(scopes)
    with closing(_StageProgress(console, total)) as stages:
        return _measure_all(subject, slides, scopes, workers=workers, quick=quick, begins=stages.begin)


def _measure_all(
    subject: BenchSubject,
    slides: BenchSlides,
    scopes: Sequence[str],
    *,
    workers: int,
    quick: bool,
    begins: Callable[[str], None],
) -> BenchResult:
    """Measure one thing after the other; `begins` is told which."""
    effort, device, tile_px = _QUICK if quick else _MeasuringTime(), subject.device, subject.card.tile_px
    begins("matrix product")
    peaks = within_memory(
        lambda: (
            matrix_peak(device, subject.dtype, budget_s=effort.peak_s),
            copy_speed(device, budget_s=effort.peak_s),
        ),
        device,
    )
    if peaks is None:
        raise InputError(
            f"There is not even memory for a matrix product on {device}.",
            hint="Is something else using it (nvidia-smi)? Or take another one with --device.",
        )
    matrix, copying = peaks
    with tempfile.TemporaryDirectory(prefix="tapfm-bench-") as folder:
        painted = not slides.files
        if painted:
            begins("painting a slide")
        files = (painted_file(Path(folder), tile_px),) if painted else slides.files
        reading = []
        for processes in dict.fromkeys([1, workers]):  # the last is what a run would have
            begins(f"reading, processes: {processes}")
            reading.append(reading_speed(files, tile_px, workers=processes, budget_s=effort.reading_s, painted=painted))
    begins("encoding")
    encoding = encoding_speed(subject, matrix.tflops, budget_s=effort.encoding_s)
    tiles = tiles_of_step(subject, slides.mean_tiles, encoding, step_s=effort.step_s)
    steps = []
    for scope in scopes:
        for way in _WAYS:
            begins(f"step, {way}, {scope}")
            steps.append(step_speed(subject, way, scope, tiles, budget_s=effort.steps_s))
    work = work_of(slides, subject.config)
    return BenchResult(
        made_on=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        encoder=subject.card.key,
        precision=matrix.precision,
        compiled=subject.compiled,
        quick=quick,
        machine=_machine_of(device),
        matrix=matrix,
        copying=copying,
        reading=reading,
        encoding=encoding,
        steps=steps,
        slides=slides,
        work=work,
        expected=expect(work, _speeds_of(reading, encoding, steps, scopes[0]), shared_cores=device.type == "cpu"),
    )


def _speeds_of(
    reading: Sequence[ReadingSpeed], encoding: EncodingSpeed, steps: Sequence[StepSpeed], scope: str
) -> Speeds:
    """Take what a run would do: read with all processes, and step in the faster of the ways that fit."""
    of_scope = [speed for row in steps if row.scope == scope and (speed := row.tiles_per_second) is not None]
    return Speeds(reading[-1].tiles_per_second, encoding.tiles_per_second, max(of_scope, default=None))


def _machine_of(device: torch.device) -> Machine:
    """Describe the machine."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Machine(
        device=_processor() if gpu is None else gpu.name,
        memory_gib=None if gpu is None else round(gpu.total_memory / GIB, 1),
        cores=available_cores(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        cuda=None if gpu is None else torch.version.cuda,
        packages={name: version for name in _PACKAGES if (version := installed_version(name)) is not None},
    )


def _processor() -> str:
    """Name the processor, as the system does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _with_speed(row: ReadingSpeed | EncodingSpeed | StepSpeed) -> dict[str, Any]:
    """Add what is computed from the others."""
    return {**asdict(row), "tiles_per_second": row.tiles_per_second}


def write(bench: BenchResult, path: Path) -> None:
    """Write all figures, whole or not at all."""
    try:
        write_atomically(path, (json.dumps(bench.as_json(), indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}).", hint="Give another file to --out.") from error

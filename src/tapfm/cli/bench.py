"""`tapfm bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console, stdout_console
from tapfm.runtime.messages import format_count
from tapfm.workflows import bench as workflow

if TYPE_CHECKING:
    from tapfm.bench.computing import StepSpeed
    from tapfm.bench.measure import BenchResult
    from tapfm.bench.reading import ReadingSpeed


@command(workflow.BenchOptions, stopped="Nothing was written.")
def bench(options: workflow.BenchOptions) -> None:
    """Measure this machine, and estimate how long training and prediction will take.

    \b
    tapfm bench
    tapfm bench --encoder h-optimus-0 --scope lora:16 --out bench.json
    tapfm bench --cohort cohort.csv --tiles tiles    for your slides
    tapfm bench run.toml                             for a run

    Matrix product, reading tiles, encoding, the adaptation step in one pass
    and in chunks; then the times of an epoch, of a training and of a slide's
    prediction, and whether reading or computing takes longer. Weights are
    random, which are as fast as any: nothing is downloaded.
    """
    measured = workflow.bench.run(options, stderr_console())
    _print_bench(measured, stdout_console())
    if options.out is not None:
        print_line(stderr_console(), f"Written: {options.out}")


def _print_bench(bench: BenchResult, console: Console) -> None:
    machine = bench.machine
    memory = "" if machine.memory_gib is None else f", {machine.memory_gib:.0f} GiB"
    compiled = ", compiled blocks" if bench.compiled else ""
    console.print(
        f"{machine.device}{memory}, {format_count(machine.cores, 'core')}; torch {machine.packages.get('torch', '?')}; "
        f"{bench.encoder} in {bench.precision}{compiled}, random weights (as fast as any)\n",
        markup=False,
    )
    console.print(_measurements_table(bench))
    console.print()
    console.print(_title(bench), markup=False)
    console.print(_expected_table(bench))
    for line in _remarks(bench):
        console.print(line, markup=False)


def _measurements_table(bench: BenchResult) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("measured", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    matrix = bench.matrix
    table.add_row("matrix product", f"{matrix.tflops:,.2f} TFLOP/s", f"{matrix.precision}, side {matrix.side:,}")
    if bench.copying is not None:
        table.add_row("copying to the GPU", f"{bench.copying:,.1f} GB/s", "from page-locked memory")
    for row in bench.reading:
        table.add_row("reading", _speed_text(row.tiles_per_second, row.problem), _describe_reading(row))
    encoding = bench.encoding
    details = [f"{encoding.gflop_per_tile:,.1f} GFLOP per tile"]
    if encoding.peak_share is not None:
        details.append(f"{encoding.peak_share:.0%} of the matrix product's speed")
    details += _describe_cost(encoding.peak_gib, encoding.compiling_s)
    table.add_row("encoding", _speed_text(encoding.tiles_per_second, encoding.problem), ", ".join(details))
    for step in bench.steps:
        table.add_row(f"step, {step.way}", _speed_text(step.tiles_per_second, step.problem), _describe_step(step))
    return table


def _speed_text(tiles_per_second: float | None, problem: str | None) -> str:
    if tiles_per_second is None:
        return problem or "-"
    return f"{tiles_per_second:,.1f} tiles/s" if tiles_per_second < 100 else f"{tiles_per_second:,.0f} tiles/s"


def _describe_reading(row: ReadingSpeed) -> str:
    what = "a painted 40x slide" if row.painted else f"{format_count(row.slides, 'slide')} of yours"
    return f"{'1 process' if row.workers == 1 else f'{row.workers} processes'}, {what}"


def _describe_step(step: StepSpeed) -> str:
    details = [f"{step.scope}, {step.tiles:,} tiles"]
    if step.chunk is not None:
        details.append(f"{step.chunk:,} at a time")
    return ", ".join(details + _describe_cost(step.peak_gib, step.compiling_s))


def _describe_cost(peak_gib: float | None, compiling_s: float | None) -> list[str]:
    from tapfm.results.formatting import format_duration

    memory = [] if peak_gib is None else [f"peak {peak_gib:.1f} GiB"]
    return memory + ([] if compiling_s is None else [f"first time {format_duration(compiling_s)} longer"])


def _title(bench: BenchResult) -> str:
    slides, train = bench.slides, len(bench.slides.tiles_of["train"])
    whose = {
        "run": "your run",
        "cohort": "your cohort",
        "paper": "the paper's BLCA cohort",
    }[slides.source]
    return f"Expected for {whose}: {slides.count:,} slides ({train:,} to train on) of {slides.mean_tiles:,} tiles each"


def _expected_table(bench: BenchResult) -> Table:
    from tapfm.results.formatting import format_duration

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("expected", no_wrap=True)
    table.add_column("tiles", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for row in bench.expected:
        seconds = row.seconds
        time = "-" if seconds is None else "under 1 s" if seconds < 1 else format_duration(seconds)
        table.add_row(row.what, f"{row.tiles:,}", time, row.bound or "")
    return table


def _remarks(bench: BenchResult) -> list[str]:
    from tapfm.bench.slides import PAPER_TILES

    lines = [f"Nothing can be read: {row.reason}" for row in bench.reading[-1:] if row.reason]
    if bench.machine.memory_gib is None:
        lines.append("Without a GPU the same cores read and compute: their times are added.")
    if bench.slides.source == "paper":
        lines.append(
            f"The paper does not give the number of tiles of its slides: {PAPER_TILES:,} are assumed. "
            "For slides of yours: --cohort and --tiles."
        )
    if bench.slides.without_tiles:
        lines.append(f"Left out, as they have no tiles: {format_count(bench.slides.without_tiles, 'slide')}.")
    if bench.compiled:
        lines.append("torch caches what it compiled: only the first time takes longer.")
    if bench.quick:
        lines.append("Quick: these measurements are rough.")
    return lines

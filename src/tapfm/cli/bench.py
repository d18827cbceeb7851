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
    from tapfm.bench.measure import BenchResult
    from tapfm.bench.model_speed import StepSpeed
    from tapfm.bench.reading_speed import ReadingSpeed


@command(workflow.BenchOptions, stop_message="No results were written.")
def bench(options: workflow.BenchOptions) -> None:
    """Measure the speed of this machine, and estimate the duration of training and prediction.

    Measures a matrix product, reading tiles, encoding, and training steps in
    one pass and in chunks. From these it estimates the duration of an epoch, a
    training run and the prediction of a slide, and whether reading or computing
    limits the speed. Random weights are used, which does not change the speed,
    so nothing is downloaded.

    \b
    Examples:
      tapfm bench
      tapfm bench --encoder h-optimus-0 --scope lora:16 --out bench.json
      tapfm bench --cohort cohort.csv --tiles tiles   # for your slides
      tapfm bench run.toml                            # for a run
    """
    result = workflow.bench.run(options, stderr_console())
    _print_bench(result, stdout_console())
    if options.out is not None:
        print_line(stderr_console(), f"Wrote {options.out}")


def _print_bench(bench: BenchResult, console: Console) -> None:
    machine = bench.machine
    memory = "" if machine.gpu_memory_gib is None else f", {machine.gpu_memory_gib:.0f} GiB"
    compiled = ", compiled" if bench.compiled else ""
    console.print(
        f"{machine.device}{memory}, {format_count(machine.cores, 'core')}; torch {machine.packages.get('torch', '?')}; "
        f"{bench.encoder} in {bench.precision}{compiled}, with random weights\n",
        markup=False,
    )
    console.print(_measurements_table(bench))
    console.print()
    console.print(_estimates_title(bench), markup=False)
    console.print(_estimates_table(bench))
    for line in _notes(bench):
        console.print(line, markup=False)


def _measurements_table(bench: BenchResult) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("measured", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    matrix_product = bench.matrix_product
    size = f"{matrix_product.precision}, side {matrix_product.side:,}"
    table.add_row("matrix product", f"{matrix_product.tflops:,.2f} TFLOP/s", size)
    if bench.copy_to_gpu is not None:
        table.add_row("copy to the GPU", f"{bench.copy_to_gpu:,.1f} GB/s", "from pinned memory")
    for row in bench.reading:
        table.add_row("read tiles", _speed_text(row.tiles_per_second, row.problem), _describe_reading(row))
    encoding = bench.encoding
    details = [f"{encoding.gflop_per_tile:,.1f} GFLOP per tile"]
    if encoding.peak_fraction is not None:
        details.append(f"{encoding.peak_fraction:.0%} of the speed of the matrix product")
    details += _describe_cost(encoding.peak_gib, encoding.compile_s)
    table.add_row("encode tiles", _speed_text(encoding.tiles_per_second, encoding.problem), ", ".join(details))
    for step in bench.steps:
        speed = _speed_text(step.tiles_per_second, step.problem)
        table.add_row(f"training step, {step.strategy}", speed, _describe_step(step))
    return table


def _speed_text(tiles_per_second: float | None, problem: str | None) -> str:
    if tiles_per_second is None:
        return problem or "-"
    return f"{tiles_per_second:,.1f} tiles/s" if tiles_per_second < 100 else f"{tiles_per_second:,.0f} tiles/s"


def _describe_reading(row: ReadingSpeed) -> str:
    source = "a synthetic 40x slide" if row.synthetic else f"{format_count(row.slides, 'slide')} of your cohort"
    return f"{'1 process' if row.workers == 1 else f'{row.workers} processes'}, {source}"


def _describe_step(step: StepSpeed) -> str:
    details = [f"{step.scope}, {step.tiles:,} tiles"]
    if step.chunk is not None:
        details.append(f"{step.chunk:,} per chunk")
    return ", ".join(details + _describe_cost(step.peak_gib, step.compile_s))


def _describe_cost(peak_gib: float | None, compile_s: float | None) -> list[str]:
    from tapfm.results.formatting import format_duration

    memory = [] if peak_gib is None else [f"peak {peak_gib:.1f} GiB"]
    return memory + ([] if compile_s is None else [f"compiled in {format_duration(compile_s)}"])


def _estimates_title(bench: BenchResult) -> str:
    slides, train = bench.slides, len(bench.slides.tiles_by_split["train"])
    name = {
        "run": "your run",
        "cohort": "your cohort",
        "paper": "the paper's BLCA cohort",
    }[slides.source]
    return (
        f"Estimates for {name}: {slides.count:,} slides ({train:,} for training), "
        f"{slides.mean_tiles:,} tiles per slide on average"
    )


def _estimates_table(bench: BenchResult) -> Table:
    from tapfm.results.formatting import format_duration

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("estimates", no_wrap=True)
    table.add_column("tiles", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    for row in bench.estimates:
        seconds = row.seconds
        time = "-" if seconds is None else "under 1 s" if seconds < 1 else format_duration(seconds)
        table.add_row(row.task, f"{row.tiles:,}", time, row.bottleneck or "")
    return table


def _notes(bench: BenchResult) -> list[str]:
    from tapfm.bench.bench_slides import PAPER_TILES

    lines = [f"Tiles could not be read: {row.reason}" for row in bench.reading[-1:] if row.reason]
    if bench.machine.gpu_memory_gib is None:
        lines.append("Without a GPU, the same cores read tiles and compute, so both times are added.")
    if bench.slides.source == "paper":
        lines.append(
            f"The paper does not report the number of tiles per slide; {PAPER_TILES:,} are assumed. "
            "For estimates for your slides: tapfm bench --cohort cohort.csv --tiles tiles"
        )
    if bench.slides.slides_without_tiles:
        lines.append(f"Excluded: {format_count(bench.slides.slides_without_tiles, 'slide')} without tiles.")
    if bench.compiled:
        lines.append("torch caches compiled code, so only the first run has to compile.")
    if bench.quick:
        lines.append("Measured with --quick: the results are less precise.")
    return lines

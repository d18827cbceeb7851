"""What was measured, as tables to read."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tapfm.bench.computing import StepSpeed
from tapfm.bench.measure import Bench
from tapfm.bench.reading import ReadingSpeed
from tapfm.bench.slides import PAPER_TILES
from tapfm.report.numbers import duration
from tapfm.runtime.messages import counted


def show(bench: Bench, console: Console) -> None:
    """Print the machine, the figures, and what is expected."""
    machine = bench.machine
    memory = "" if machine.memory_gib is None else f", {machine.memory_gib:.0f} GiB"
    compiled = ", compiled blocks" if bench.compiled else ""
    console.print(
        f"{machine.device}{memory}, {counted(machine.cores, 'core')}; torch {machine.packages.get('torch', '?')}; "
        f"{bench.encoder} in {bench.precision}{compiled}, random weights (as fast as any)\n",
        markup=False,
    )
    console.print(figures(bench))
    console.print()
    console.print(title_of(bench), markup=False)
    console.print(expectations(bench))
    for line in remarks(bench):
        console.print(line, markup=False)


def figures(bench: Bench) -> Table:
    """Lay out what was measured."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("measured", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    matrix = bench.matrix
    table.add_row("matrix product", f"{matrix.tflops:,.2f} TFLOP/s", f"{matrix.precision}, side {matrix.side:,}")
    if bench.copying is not None:
        table.add_row("copying to the GPU", f"{bench.copying.gb_per_second:,.1f} GB/s", "from page-locked memory")
    for row in bench.reading:
        table.add_row("reading", speed_of(row.tiles_per_second, row.problem), about_reading(row))
    encoding = bench.encoding
    details = [f"{encoding.gflop_per_tile:,.1f} GFLOP per tile"]
    if encoding.peak_share is not None:
        details.append(f"{encoding.peak_share:.0%} of the matrix product's speed")
    details += extra(encoding.peak_gib, encoding.compiling_s)
    table.add_row("encoding", speed_of(encoding.tiles_per_second, encoding.problem), ", ".join(details))
    for step in bench.steps:
        table.add_row(f"step, {step.way}", speed_of(step.tiles_per_second, step.problem), about_step(step))
    return table


def speed_of(tiles_per_second: float | None, problem: str | None) -> str:
    """Write a speed, or why there is none."""
    if tiles_per_second is None:
        return problem or "-"
    return f"{tiles_per_second:,.1f} tiles/s" if tiles_per_second < 100 else f"{tiles_per_second:,.0f} tiles/s"


def about_reading(row: ReadingSpeed) -> str:
    """Say who read what."""
    what = "a painted 40x slide" if row.painted else f"{counted(row.slides, 'slide')} of yours"
    return f"{'1 process' if row.workers == 1 else f'{row.workers} processes'}, {what}"


def about_step(step: StepSpeed) -> str:
    """Say what was learnt how."""
    details = [f"{step.scope}, {step.tiles:,} tiles"]
    if step.chunk is not None:
        details.append(f"{step.chunk:,} at a time")
    return ", ".join(details + extra(step.peak_gib, step.compiling_s))


def extra(peak_gib: float | None, compiling_s: float | None) -> list[str]:
    """Say what it took besides."""
    memory = [] if peak_gib is None else [f"peak {peak_gib:.1f} GiB"]
    return memory + ([] if compiling_s is None else [f"first time {duration(compiling_s)} longer"])


def title_of(bench: Bench) -> str:
    """Say for which slides times are expected."""
    slides, train = bench.slides, len(bench.slides.tiles_of["train"])
    whose = {
        "run": "your run",
        "cohort": "your cohort",
        "paper": "the paper's BLCA cohort",
    }[slides.source]
    return f"Expected for {whose}: {slides.count:,} slides ({train:,} to train on) of {slides.mean_tiles:,} tiles each"


def expectations(bench: Bench) -> Table:
    """Lay out what is expected."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("expected", no_wrap=True)
    table.add_column("tiles", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for row in bench.expected:
        seconds = row.seconds
        time = "-" if seconds is None else "under 1 s" if seconds < 1 else duration(seconds)
        table.add_row(row.what, f"{row.tiles:,}", time, row.bound or "")
    return table


def remarks(bench: Bench) -> list[str]:
    """Say what a reader should know."""
    lines = [f"Nothing can be read: {row.reason}" for row in bench.reading[-1:] if row.reason]
    if bench.machine.memory_gib is None:
        lines.append("Without a GPU the same cores read and compute: their times are added.")
    if bench.slides.source == "paper":
        lines.append(
            f"The paper does not say how many tiles its slides have: {PAPER_TILES:,} are taken. "
            "For slides of yours: --cohort and --tiles."
        )
    if bench.slides.without_tiles:
        lines.append(f"Without tiles, and left out: {counted(bench.slides.without_tiles, 'slide')}.")
    if bench.compiled:
        lines.append("What torch has compiled is kept: the first time is only once as long.")
    if bench.quick:
        lines.append("Quick: figures are rough.")
    return lines

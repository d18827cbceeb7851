"""`tapfm synth`: paint a cohort of H&E slides with a planted signal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import count_workers
from tapfm.workflows.shared_options import Workers

if TYPE_CHECKING:
    from tapfm.synthetic.cohort import CohortSpec, PlannedSlide


@options
class SynthOptions:
    """Options of `tapfm synth`."""

    out: Annotated[Path, Argument("A new folder for slides, tables and truth.", metavar="OUT")]
    _: KW_ONLY
    slides: Annotated[int, Option("Slides of the development cohort.")] = 60
    external: Annotated[int, Option("Slides of the external cohort: other sites, another scanner.")] = 30
    task: Annotated[str, Option("fgfr3 (one target) or luad4 (EGFR, KRAS, MET, ALK at once).")] = "fgfr3"
    difficulty: Annotated[
        str, Option("easy, medium or hard: how many tiles show the signal, how clearly, and how much resembles it.")
    ] = "medium"
    prevalence: Annotated[
        tuple[str, ...],
        Option(
            "Share of positive slides, for all targets or one; repeatable.",
            metavar="P|TARGET=P",
            default="as in the paper",
        ),
    ] = ()
    fractions: Annotated[
        tuple[float, float, float],
        Option("How the development cohort is split.", metavar="TRAIN VAL TEST", default="0.8 0.1 0.1"),
    ] = (0.8, 0.1, 0.1)
    tiles: Annotated[int, Option("Approximate number of tissue tiles on a slide.")] = 80
    seed: Annotated[int, Option("The same seed paints the same cohort.")] = 0
    workers: Workers = None
    force: Annotated[
        bool, Option("Paint everything again / keep slides that are painted.", flags="--force/--resume")
    ] = False


@dataclass(frozen=True)
class SyntheticCohort:
    """A painted cohort."""

    folder: Path
    spec: CohortSpec
    slides: Sequence[PlannedSlide]


@command_function(SynthOptions)
def synth(options: SynthOptions, console: Console) -> SyntheticCohort:
    """Paint a cohort of slides with a planted signal, its tables and its truth."""
    from tapfm.synthetic.cohort_generation import generate_cohort, parse_cohort_spec

    spec = parse_cohort_spec(
        options.slides,
        options.external,
        options.task,
        options.difficulty,
        options.prevalence,
        options.fractions,
        options.tiles,
        options.seed,
    )
    workers = count_workers(options.workers)
    return SyntheticCohort(
        options.out, spec, generate_cohort(spec, options.out, workers=workers, force=options.force, console=console)
    )

"""`tapfm synth`: generate a cohort of synthetic H&E slides with a planted signal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import choose_worker_count
from tapfm.workflows.shared_options import Workers

if TYPE_CHECKING:
    from tapfm.synthetic.cohort_plan import CohortSpec, PlannedSlide


@options
class SynthOptions:
    """Options of `tapfm synth`."""

    out: Annotated[Path, Argument("New folder for slides, tables and ground truth.", metavar="OUT")]
    _: KW_ONLY
    slides: Annotated[int, Option("Number of slides in the development cohort.")] = 60
    external: Annotated[
        int, Option("Number of slides in the external cohort, which has other sites and another scanner.")
    ] = 30
    task: Annotated[
        str, Option("Task to simulate: fgfr3 (one target) or luad4 (multi-label: EGFR, KRAS, MET and ALK).")
    ] = "fgfr3"
    difficulty: Annotated[
        str,
        Option(
            "easy, medium or hard. Harder: fewer tiles with a signal, a weaker signal, more tiles that resemble it."
        ),
    ] = "medium"
    prevalence: Annotated[
        tuple[str, ...],
        Option(
            "Fraction of positive slides, larger than 0 and smaller than 1, for all targets or for one. Repeatable.",
            metavar="P|TARGET=P",
            show_default="as in the paper",
        ),
    ] = ()
    fractions: Annotated[
        tuple[float, float, float],
        Option(
            "Fractions of the development cohort in train, validation and test. They sum to 1.",
            metavar="TRAIN VAL TEST",
            show_default="0.8 0.1 0.1",
        ),
    ] = (0.8, 0.1, 0.1)
    tiles_per_slide: Annotated[int, Option("Approximate number of tissue tiles per slide.")] = 80
    seed: Annotated[int, Option("Random seed. The same seed generates the same cohort.")] = 0
    workers: Workers = None
    force: Annotated[bool, Option("Generate all slides again, or keep those that exist.", flag="--force/--resume")] = (
        False
    )


@dataclass(frozen=True)
class SyntheticCohort:
    """Folder, specification and slides of a generated cohort."""

    folder: Path
    spec: CohortSpec
    slides: Sequence[PlannedSlide]


@command_function(SynthOptions)
def synth(options: SynthOptions, console: Console) -> SyntheticCohort:
    """Generate slides with a planted signal, their cohort tables and the ground truth."""
    from tapfm.synthetic.cohort_generation import generate_cohort, parse_cohort_spec

    spec = parse_cohort_spec(
        options.slides,
        options.external,
        options.task,
        options.difficulty,
        options.prevalence,
        options.fractions,
        options.tiles_per_slide,
        options.seed,
    )
    workers = choose_worker_count(options.workers)
    return SyntheticCohort(
        options.out, spec, generate_cohort(spec, options.out, workers=workers, force=options.force, console=console)
    )

"""Resolve the microns per pixel (mpp) of a slide. This value alone determines the size of its tiles at level 0.

Sources in order of priority: the column `mpp` of the cohort table, the value in the file, the objective power (with a
warning). An implausible value in the file is an error, because every tile of the slide would have the wrong scale.
`tapfm predict --mpp` replaces this error: it is the scale of the slides that have none of these, or an implausible one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tapfm.errors import InputError, ScaleError
from tapfm.slides.slide import SlideMetadata

_PLAUSIBLE_MPP = (0.1, 1.2)  # um per pixel; about 100x to 8x
_MAX_NOMINAL_RATIO = 1.7  # file value / nominal value, or its inverse; above it the two contradict each other
# Relative difference to the nominal value. Larger differences only give a warning, as some real scanners have them.
_NOMINAL_TOLERANCE = 0.15

MPP_OPTION: Literal["--mpp"] = "--mpp"
ScaleSource = Literal["cohort table", "file", "objective", "--mpp"]
SCALE_HINT = (
    "Enter the correct microns per pixel in the column `mpp` of the cohort table; it overrides the file. "
    "To create a table: tapfm inspect SLIDES --write-cohort cohort.csv"
)


@dataclass(frozen=True)
class Scale:
    """Microns per level-0 pixel, the source of the value, and warnings about it."""

    mpp: float
    source: ScaleSource
    warnings: tuple[str, ...] = ()


def nominal_mpp(objective_power: float) -> float:
    """Return the microns per pixel that an objective power usually has: 0.5 for 20x, 0.25 for 40x."""
    return 10 / objective_power


def check_mpp_option(mpp: float) -> None:
    """Raise InputError if the value of --mpp is implausible."""
    low, high = _PLAUSIBLE_MPP
    if not low <= mpp <= high:  # also for NaN
        raise InputError(
            f"--mpp must be between {low:g} and {high:g} um per pixel; got {mpp:g}.",
            hint="A slide scanned at 40x has about 0.25 um per pixel, one scanned at 20x about 0.5. For example: "
            "--mpp 0.25",
        )


def resolve_scale(metadata: SlideMetadata, table_mpp: float | None = None, mpp_option: float | None = None) -> Scale:
    """Return the microns per pixel of a slide.

    Raises ScaleError if they are unknown, or implausible in the file; an implausible `table_mpp` only gives a warning.
    `mpp_option` is used instead of raising, unless it contradicts the objective power.
    """
    try:
        return _resolve_own_scale(metadata, table_mpp)
    except ScaleError as error:
        if mpp_option is None:
            raise
        objective = metadata.objective_power
        if objective is not None and _is_plausible(nominal_mpp(objective)) and _contradicts(mpp_option, objective):
            raise ScaleError(
                f"{error.message} {MPP_OPTION} {mpp_option:g} is not used for it, because {objective:g}x usually means "
                f"{nominal_mpp(objective):.4g}.",
                hint=SCALE_HINT,
            ) from error
        refused = () if metadata.mpp_in_file is None else (f"{error.message} Using {MPP_OPTION} {mpp_option:g}",)
        return Scale(mpp_option, MPP_OPTION, (*refused, *_objective_mismatch_warnings(mpp_option, objective)))


def _resolve_own_scale(metadata: SlideMetadata, table_mpp: float | None) -> Scale:
    """Return the microns per pixel from the cohort table or the file."""
    notes = (metadata.note,) if metadata.note else ()
    objective = metadata.objective_power
    if table_mpp is not None:
        unusual = (f"the cohort table gives an unusual value of {table_mpp:g} um per pixel",)
        implausible = () if _is_plausible(table_mpp) else unusual
        return Scale(table_mpp, "cohort table", (*implausible, *_objective_mismatch_warnings(table_mpp, objective)))
    name, mpp = metadata.path.name, metadata.mpp_in_file
    if mpp is None:
        if objective is None:
            raise ScaleError(
                f"The metadata of {name} contain neither microns per pixel nor an objective power.", hint=SCALE_HINT
            )
        assumed = nominal_mpp(objective)
        if not _is_plausible(assumed):
            raise ScaleError(
                f"The metadata of {name} contain no microns per pixel, and an implausible objective power of "
                f"{objective:g}.",
                hint=SCALE_HINT,
            )
        warning = f"no microns per pixel in the file; assuming {assumed:g} from the objective power of {objective:g}x"
        return Scale(assumed, "objective", (*notes, warning))
    if not _is_plausible(mpp):
        raise ScaleError(
            f"The metadata of {name} give {mpp:.4g} um per pixel, outside the plausible range of "
            f"{_PLAUSIBLE_MPP[0]:g} to {_PLAUSIBLE_MPP[1]:g}.",
            hint=SCALE_HINT,
        )
    if objective is not None and _contradicts(mpp, objective):
        raise ScaleError(
            f"The metadata of {name} contradict each other: {mpp:.4g} um per pixel, but an objective power of "
            f"{objective:g}x, which usually means {nominal_mpp(objective):.4g}.",
            hint=SCALE_HINT,
        )
    return Scale(mpp, "file", (*notes, *_objective_mismatch_warnings(mpp, objective)))


def _is_plausible(mpp: float) -> bool:
    return _PLAUSIBLE_MPP[0] <= mpp <= _PLAUSIBLE_MPP[1]


def _contradicts(mpp: float, objective_power: float) -> bool:
    ratio = mpp / nominal_mpp(objective_power)
    return max(ratio, 1 / ratio) > _MAX_NOMINAL_RATIO


def _objective_mismatch_warnings(mpp: float, objective_power: float | None) -> tuple[str, ...]:
    """Return a warning if the microns per pixel differ by more than 15% from the usual value of the objective power."""
    if objective_power is None:
        return ()
    nominal = nominal_mpp(objective_power)
    if abs(mpp / nominal - 1) <= _NOMINAL_TOLERANCE:
        return ()
    return (f"{mpp:.4g} um per pixel, although {objective_power:g}x usually means {nominal:.4g}",)

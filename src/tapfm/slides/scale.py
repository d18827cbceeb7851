"""Resolve the microns per pixel (mpp) of a slide. This value alone determines the size of its tiles at level 0.

Sources in order of priority: the column `mpp` of the cohort table, the value in the file, the objective power (with a
warning). An implausible value in the file is an error, because every tile of the slide would have the wrong scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tapfm.errors import ScaleError
from tapfm.slides.slide import SlideMetadata

_PLAUSIBLE_MPP = (0.1, 1.2)  # um per pixel; about 100x to 8x
_MAX_NOMINAL_RATIO = 1.7  # file value / nominal value, or its inverse; above it the two contradict each other
# Relative difference to the nominal value. Larger differences only give a warning, as some real scanners have them.
_NOMINAL_TOLERANCE = 0.15

ScaleSource = Literal["cohort table", "file", "objective"]


@dataclass(frozen=True)
class Scale:
    """Microns per level-0 pixel, the source of the value, and warnings about it."""

    mpp: float
    source: ScaleSource
    warnings: tuple[str, ...] = ()


def nominal_mpp(objective_power: float) -> float:
    """Return the microns per pixel that an objective power usually has: 0.5 for 20x, 0.25 for 40x."""
    return 10 / objective_power


def resolve_scale(metadata: SlideMetadata, table_mpp: float | None = None) -> Scale:
    """Return the microns per pixel of a slide.

    Raises ScaleError if they are unknown, or implausible in the file; an implausible `table_mpp` only gives a warning.
    """
    notes = (metadata.note,) if metadata.note else ()
    objective = metadata.objective_power
    if table_mpp is not None:
        plausible = _PLAUSIBLE_MPP[0] <= table_mpp <= _PLAUSIBLE_MPP[1]
        implausible = () if plausible else (f"the cohort table gives an unusual value of {table_mpp:g} um per pixel",)
        return Scale(table_mpp, "cohort table", (*implausible, *_objective_mismatch_warnings(table_mpp, objective)))
    name, mpp = metadata.path.name, metadata.mpp_in_file
    hint = (
        "Enter the correct microns per pixel in the column `mpp` of the cohort table; it overrides the file. "
        "To create a table: tapfm inspect SLIDES --write-cohort cohort.csv"
    )
    if mpp is None:
        if objective is None:
            raise ScaleError(
                f"The metadata of {name} contain neither microns per pixel nor an objective power.", hint=hint
            )
        assumed = nominal_mpp(objective)
        if not _PLAUSIBLE_MPP[0] <= assumed <= _PLAUSIBLE_MPP[1]:
            raise ScaleError(
                f"The metadata of {name} contain no microns per pixel, and an implausible objective power of "
                f"{objective:g}.",
                hint=hint,
            )
        warning = f"no microns per pixel in the file; assuming {assumed:g} from the objective power of {objective:g}x"
        return Scale(assumed, "objective", (*notes, warning))
    if not _PLAUSIBLE_MPP[0] <= mpp <= _PLAUSIBLE_MPP[1]:
        raise ScaleError(
            f"The metadata of {name} give {mpp:.4g} um per pixel, outside the plausible range of "
            f"{_PLAUSIBLE_MPP[0]:g} to {_PLAUSIBLE_MPP[1]:g}.",
            hint=hint,
        )
    if objective is not None:
        ratio = mpp / nominal_mpp(objective)
        if max(ratio, 1 / ratio) > _MAX_NOMINAL_RATIO:
            raise ScaleError(
                f"The metadata of {name} contradict each other: {mpp:.4g} um per pixel, but an objective power of "
                f"{objective:g}x, which usually means {nominal_mpp(objective):.4g}.",
                hint=hint,
            )
    return Scale(mpp, "file", (*notes, *_objective_mismatch_warnings(mpp, objective)))


def _objective_mismatch_warnings(mpp: float, objective_power: float | None) -> tuple[str, ...]:
    """Return a warning if the microns per pixel differ by more than 15% from the usual value of the objective power."""
    if objective_power is None:
        return ()
    nominal = nominal_mpp(objective_power)
    if abs(mpp / nominal - 1) <= _NOMINAL_TOLERANCE:
        return ()
    return (f"{mpp:.4g} um per pixel, although {objective_power:g}x usually means {nominal:.4g}",)

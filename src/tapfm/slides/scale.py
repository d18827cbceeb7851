"""How many microns a level-0 pixel covers, and whether to believe it. Nothing else decides the size of a tile.

In this order: the manifest's column `mpp`, the file's own value, the objective power (with a warning). A value in the
file that cannot be is refused rather than guessed at: every tile of that slide would be at the wrong scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tapfm.errors import ScaleError
from tapfm.slides.slide import SlideFacts

_PLAUSIBLE = (0.1, 1.2)  # um per pixel, of slides that are scanned for reading: about 100x to 8x
_CONTRADICTED = 1.7  # times the nominal value, or one part in it
_IMPRECISE = 0.15  # off the nominal value: seen on real scanners, worth a look

ScaleSource = Literal["manifest", "file", "objective"]


@dataclass(frozen=True)
class Scale:
    """Microns per level-0 pixel, who said so, and what is odd about it."""

    mpp: float
    source: ScaleSource
    warnings: tuple[str, ...] = ()


def nominal_mpp(objective_power: float) -> float:
    """Say what an objective stands for: 20x is 0.5 um per pixel, 40x is 0.25."""
    return 10 / objective_power


def resolve_scale(facts: SlideFacts, manifest_mpp: float | None = None) -> Scale:
    """Decide a slide's microns per pixel, or say why that cannot be done."""
    notes = (facts.note,) if facts.note else ()
    objective = facts.objective_power
    if manifest_mpp is not None:
        odd = () if _PLAUSIBLE[0] <= manifest_mpp <= _PLAUSIBLE[1] else (f"{manifest_mpp:g} um per pixel in the table",)
        return Scale(manifest_mpp, "manifest", (*odd, *_off_nominal(manifest_mpp, objective)))
    name, mpp = facts.path.name, facts.mpp_in_file
    hint = "Write the true microns per pixel into the column `mpp` of the cohort's CSV; it overrules the file."
    if mpp is None:
        if objective is None:
            raise ScaleError(f"{name} says neither its microns per pixel nor its objective power.", hint=hint)
        assumed = nominal_mpp(objective)
        if not _PLAUSIBLE[0] <= assumed <= _PLAUSIBLE[1]:
            raise ScaleError(f"{name} has no microns per pixel, and an objective power of {objective:g}.", hint=hint)
        warning = f"no microns per pixel in the file: {assumed:g} taken from its objective power of {objective:g}x"
        return Scale(assumed, "objective", (*notes, warning))
    if not _PLAUSIBLE[0] <= mpp <= _PLAUSIBLE[1]:
        raise ScaleError(
            f"{name} says it has {mpp:.4g} um per pixel, outside {_PLAUSIBLE[0]:g} to {_PLAUSIBLE[1]:g}.", hint=hint
        )
    if objective is not None:
        ratio = mpp / nominal_mpp(objective)
        if max(ratio, 1 / ratio) > _CONTRADICTED:
            raise ScaleError(
                f"{name} says {mpp:.4g} um per pixel and an objective power of {objective:g}x, "
                f"which is {nominal_mpp(objective):.4g}: one of them is wrong.",
                hint=hint,
            )
    return Scale(mpp, "file", (*notes, *_off_nominal(mpp, objective)))


def _off_nominal(mpp: float, objective_power: float | None) -> tuple[str, ...]:
    """Warn of a value that is far from what the objective stands for."""
    if objective_power is None:
        return ()
    nominal = nominal_mpp(objective_power)
    if abs(mpp / nominal - 1) <= _IMPRECISE:
        return ()
    return (f"{mpp:.4g} um per pixel, where {objective_power:g}x usually means {nominal:.4g}",)

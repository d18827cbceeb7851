"""A planned slide, painted: its pixels and its truth."""

from __future__ import annotations

from dataclasses import dataclass

from tapfm.synthetic.cohort import PlannedSlide
from tapfm.synthetic.rendering import render_stains
from tapfm.synthetic.scanning import Scan, scan_section
from tapfm.synthetic.section import plan_section
from tapfm.synthetic.truth import SlideTruth


@dataclass(frozen=True)
class SyntheticSlide:
    """What a scanner saw, and what was there."""

    scan: Scan
    truth: SlideTruth


def render_slide(planned: PlannedSlide) -> SyntheticSlide:
    """Plan the section, stain it, scan it."""
    section = plan_section(planned.section, *planned.address)
    stains = render_stains(section, planned.scanner.mpp, *planned.address)
    scanned = scan_section(
        stains, section.tissue, planned.staining, planned.scanner, planned.artefacts, *planned.address
    )
    height, width = scanned.pixels.shape[:2]
    foci = tuple(focus.name for focus in planned.section.foci)
    truth = SlideTruth(section.compartments, section.focus, foci, width, height, planned.scanner.mpp)
    return SyntheticSlide(scanned, truth)

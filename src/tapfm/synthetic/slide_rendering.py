"""Render a planned slide: its pixels and its ground truth."""

from __future__ import annotations

from dataclasses import dataclass

from tapfm.synthetic.cohort_plan import PlannedSlide
from tapfm.synthetic.scanning import Scan, scan_section
from tapfm.synthetic.section import generate_section
from tapfm.synthetic.stain_rendering import render_stains
from tapfm.synthetic.truth import SlideTruth


@dataclass(frozen=True)
class SyntheticSlide:
    """A rendered slide and its ground truth."""

    scan: Scan
    truth: SlideTruth


def render_slide(planned: PlannedSlide) -> SyntheticSlide:
    """Generate the section of a slide, render its stains and scan it."""
    section = generate_section(planned.section, *planned.rng_key)
    stains = render_stains(section, planned.scanner.mpp, *planned.rng_key)
    scan = scan_section(stains, section.tissue, planned.staining, planned.scanner, planned.artefacts, *planned.rng_key)
    height, width = scan.pixels.shape[:2]
    foci = tuple(focus.name for focus in planned.section.foci)
    truth = SlideTruth(section.compartments, section.focus, foci, width, height, planned.scanner.mpp)
    return SyntheticSlide(scan, truth)

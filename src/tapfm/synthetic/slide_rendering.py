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


def render_slide(slide: PlannedSlide) -> SyntheticSlide:
    """Generate the section of a slide, render the stain amounts of the section, and scan it."""
    section = generate_section(slide.section, *slide.rng_key)
    stains = render_stains(section, slide.scanner.mpp, *slide.rng_key)
    scan = scan_section(stains, section.tissue, slide.staining, slide.scanner, slide.artefacts, *slide.rng_key)
    height, width = scan.pixels.shape[:2]
    focus_names = tuple(focus.name for focus in slide.section.foci)
    truth = SlideTruth(section.compartments, section.foci_map, focus_names, width, height, slide.scanner.mpp)
    return SyntheticSlide(scan, truth)

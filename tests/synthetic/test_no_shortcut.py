"""No shortcut: the planted signal changes neither the stain statistics nor the amount of tissue nor the file size.

Each slide is rendered with and without the signal. The mean difference of the pairs must be below a quarter of the
standard deviation between slides.
"""

from dataclasses import replace

import numpy as np
import pytest

from tapfm.synthetic.cohort_plan import CohortSpec, plan_cohort
from tapfm.synthetic.slide_file import encode_svs
from tapfm.synthetic.slide_rendering import render_slide

PAIRS = 12


def slide_statistics(planned):
    """Return colour statistics of the tissue, the fraction of tissue and the file size."""
    pixels = render_slide(planned).scan.pixels
    file_size = len(encode_svs(pixels, planned.scanner, planned.slide_id))
    flat = pixels[::2, ::2].reshape(-1, 3).astype(np.float64)
    tissue = flat[flat.min(1) < 215]
    density = -np.log(np.maximum(tissue, 1) / 255)
    parts = [
        tissue.mean(0),
        tissue.std(0),
        density.mean(0),
        density.std(0),
        np.percentile(tissue, [10, 50, 90], axis=0),
    ]
    return np.concatenate([np.ravel(part) for part in parts] + [[len(tissue) / len(flat), file_size]])


def standardised_differences(pairs):
    """Return the mean differences within pairs, in standard deviations between slides."""
    first, second = (np.array([slide_statistics(pair[side]) for pair in pairs]) for side in (0, 1))
    return (second - first).mean(0) / first.std(0)


@pytest.fixture(scope="module")
def slides():
    """Positive slides of the strongest signal; only 20x, because 40x takes four times as long."""
    settings = {"slides": 40, "external": 0, "tiles": 16, "difficulty": "easy", "prevalence": {"FGFR3": 0.9}}
    planned = [each for each in plan_cohort(CohortSpec(**settings)) if each.scanner.objective == 20]
    return [each for each in planned if each.labels["FGFR3"]][:PAIRS]


def test_signal_does_not_change_stain_or_size(slides):
    without = [replace(each, section=replace(each.section, foci=())) for each in slides]
    assert np.abs(standardised_differences(list(zip(without, slides, strict=True)))).max() < 0.25


def test_ten_percent_stronger_stain_is_detected(slides):
    stronger = [
        replace(each, staining=replace(each.staining, haematoxylin_strength=1.1 * each.staining.haematoxylin_strength))
        for each in slides
    ]
    assert np.abs(standardised_differences(list(zip(slides, stronger, strict=True)))).max() > 0.25

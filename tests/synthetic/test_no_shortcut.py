"""No shortcut: the same slide painted with and without the signal has the same stain, size and file.

Pairs see smaller differences than a model on some slides could: a quarter of what slides differ by among themselves.
"""

from dataclasses import replace

import numpy as np
import pytest

from tapfm.synthetic.cohort import CohortSpec, plan_cohort
from tapfm.synthetic.slide_file import encode_svs
from tapfm.synthetic.slides import render_slide

PAIRS = 12


def stain_and_size(planned):
    """Colours of the tissue and how they vary, how much tissue there is, and the size of the file."""
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


def differences(pairs):
    """Mean difference within pairs, in deviations between slides."""
    first, second = (np.array([stain_and_size(pair[side]) for pair in pairs]) for side in (0, 1))
    return (second - first).mean(0) / first.std(0)


@pytest.fixture(scope="module")
def slides():
    """Make positive slides where most is planted, most clearly; at 20x, since 40x takes four times as long."""
    settings = {"slides": 40, "external": 0, "tiles": 16, "difficulty": "easy", "prevalence": {"FGFR3": 0.9}}
    planned = [each for each in plan_cohort(CohortSpec(**settings)) if each.scanner.objective == 20]
    return [each for each in planned if each.labels["FGFR3"]][:PAIRS]


def test_the_signal_changes_neither_stain_nor_size(slides):
    without = [replace(each, section=replace(each.section, foci=())) for each in slides]
    assert np.abs(differences(list(zip(without, slides, strict=True)))).max() < 0.25


def test_a_stain_a_tenth_stronger_would_be_seen(slides):
    stronger = [
        replace(each, staining=replace(each.staining, haematoxylin_strength=1.1 * each.staining.haematoxylin_strength))
        for each in slides
    ]
    assert np.abs(differences(list(zip(slides, stronger, strict=True)))).max() > 0.25

"""Microns per pixel: who is believed, and when nobody is."""

from dataclasses import replace
from pathlib import Path

import pytest
from slide_files import REAL, needs_real_slides

from tapfm.errors import ScaleError
from tapfm.slides.opening import open_slide
from tapfm.slides.scale import resolve_scale
from tapfm.slides.slide import Box, Level, SlideMetadata

FACTS = SlideMetadata(
    Path("case-17.svs"), "SVS", "aperio", "tiff", (Level.from_sizes(10, 10, 10, 10),), None, None, Box(0, 0, 10, 10)
)


def metadata(mpp, objective=None):
    return replace(FACTS, mpp_in_file=mpp, objective_power=objective)


@pytest.mark.parametrize(
    ("in_file", "objective", "manifest", "mpp", "source", "warned"),
    [
        (0.499, 20, None, 0.499, "file", False),
        (0.2645, 40, None, 0.2645, "file", False),
        (0.33, None, None, 0.33, "file", False),
        (0.1, None, None, 0.1, "file", False),
        (1.2, None, None, 1.2, "file", False),
        (0.33, 40, None, 0.33, "file", True),  # 32% off, a scanner's own optics
        (0.5, 20, 0.25, 0.25, "manifest", True),
        (None, None, 0.25, 0.25, "manifest", False),
        (0.00499, None, 0.499, 0.499, "manifest", False),
        (0.5, 20, 4.0, 4.0, "manifest", True),
        (None, None, 4.0, 4.0, "manifest", True),  # it wins, and is worth a look
        (None, None, 0.05, 0.05, "manifest", True),
        (None, 20, None, 0.5, "objective", True),
        (None, 40, None, 0.25, "objective", True),
    ],
)
def test_who_is_believed(in_file, objective, manifest, mpp, source, warned):
    scale = resolve_scale(metadata(in_file, objective), manifest)
    assert (scale.mpp, scale.source, bool(scale.warnings)) == (mpp, source, warned)


@pytest.mark.parametrize(
    ("in_file", "objective", "says"),
    [
        (0.00499, None, "0.00499 um per pixel, outside 0.1 to 1.2"),
        (2.5, 4, "2.5 um per pixel, outside"),
        (0.0999, None, "outside"),
        (1.21, None, "outside"),
        (0.5, 40, "0.5 um per pixel and an objective power of 40x, which is 0.25"),
        (0.25, 20, "one of them is wrong"),
        (None, None, "neither its microns per pixel nor its objective power"),
        (None, 2, "objective power of 2"),
    ],
)
def test_what_is_refused(in_file, objective, says):
    with pytest.raises(ScaleError) as error:
        resolve_scale(metadata(in_file, objective))
    assert says in str(error.value)
    assert "case-17.svs" in error.value.message
    assert "column `mpp`" in error.value.hint


@pytest.mark.parametrize(
    ("mpp", "refused"), [(0.25 * 1.69, False), (0.25 * 1.71, True), (0.25 / 1.69, False), (0.25 / 1.71, True)]
)
def test_a_contradiction_begins_at_1_7(mpp, refused):
    if refused:
        with pytest.raises(ScaleError, match="one of them is wrong"):
            resolve_scale(metadata(mpp, 40))
    else:
        assert resolve_scale(metadata(mpp, 40)).warnings


@pytest.mark.parametrize(
    ("mpp", "warned"), [(0.5 * 1.149, False), (0.5 * 1.151, True), (0.5 * 0.851, False), (0.5 * 0.849, True)]
)
def test_a_warning_begins_at_15_percent(mpp, warned):
    assert bool(resolve_scale(metadata(mpp, 20)).warnings) == warned


def test_pixels_that_are_not_square_are_told():
    odd = replace(metadata(0.5), note="pixels are not square")
    assert resolve_scale(odd).warnings == ("pixels are not square",)


@needs_real_slides
def test_the_real_slide_that_is_wrong_by_100_is_refused():
    with pytest.raises(ScaleError, match=r"0\.00499"):
        resolve_scale(open_slide(REAL / "CMU-1-Small-Region.jpeg.tiff").metadata)
    assert resolve_scale(open_slide(REAL / "CMU-1-Small-Region.jpeg.tiff").metadata, 0.499).mpp == 0.499

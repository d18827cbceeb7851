"""Resolution of microns per pixel: priority of sources, warnings and errors."""

from dataclasses import replace
from pathlib import Path

import pytest
from slide_files import REAL, needs_real_slides

from tapfm.errors import ScaleError
from tapfm.slides.opening import open_slide
from tapfm.slides.scale import resolve_scale
from tapfm.slides.slide import Box, Level, SlideMetadata

METADATA = SlideMetadata(
    Path("case-17.svs"), "SVS", "aperio", "tiff", (Level.from_sizes(10, 10, 10, 10),), None, None, Box(0, 0, 10, 10)
)


def make_metadata(mpp, objective=None):
    return replace(METADATA, mpp_in_file=mpp, objective_power=objective)


@pytest.mark.parametrize(
    ("in_file", "objective", "in_table", "mpp", "source", "warned"),
    [
        (0.499, 20, None, 0.499, "file", False),
        (0.2645, 40, None, 0.2645, "file", False),
        (0.33, None, None, 0.33, "file", False),
        (0.1, None, None, 0.1, "file", False),
        (1.2, None, None, 1.2, "file", False),
        (0.33, 40, None, 0.33, "file", True),  # differs by 32% from the nominal value, as some scanners do
        (0.5, 20, 0.25, 0.25, "cohort table", True),
        (None, None, 0.25, 0.25, "cohort table", False),
        (0.00499, None, 0.499, 0.499, "cohort table", False),
        (0.5, 20, 4.0, 4.0, "cohort table", True),
        (None, None, 4.0, 4.0, "cohort table", True),  # used, with a warning
        (None, None, 0.05, 0.05, "cohort table", True),
        (None, 20, None, 0.5, "objective", True),
        (None, 40, None, 0.25, "objective", True),
    ],
)
def test_priority_of_sources(in_file, objective, in_table, mpp, source, warned):
    scale = resolve_scale(make_metadata(in_file, objective), in_table)
    assert (scale.mpp, scale.source, bool(scale.warnings)) == (mpp, source, warned)


@pytest.mark.parametrize(
    ("in_file", "objective", "message"),
    [
        (0.00499, None, "0.00499 um per pixel, outside the plausible range of 0.1 to 1.2"),
        (2.5, 4, "2.5 um per pixel, outside"),
        (0.0999, None, "outside"),
        (1.21, None, "outside"),
        (0.5, 40, "0.5 um per pixel, but an objective power of 40x, which usually means 0.25"),
        (0.25, 20, "contradict each other"),
        (None, None, "neither microns per pixel nor an objective power"),
        (None, 2, "objective power of 2"),
    ],
)
def test_unknown_or_implausible_scale_is_an_error(in_file, objective, message):
    with pytest.raises(ScaleError) as error:
        resolve_scale(make_metadata(in_file, objective))
    assert message in str(error.value)
    assert "case-17.svs" in error.value.message
    assert "column `mpp`" in error.value.hint


@pytest.mark.parametrize(
    ("in_file", "objective", "in_table", "mpp", "source", "warned"),
    [
        (None, None, None, 0.25, "--mpp", False),
        (None, None, 1.0, 1.0, "cohort table", False),
        (0.5, None, None, 0.5, "file", False),
        (None, 20, None, 0.5, "objective", True),  # an estimate of this slide
        (0.00499, None, None, 0.25, "--mpp", True),
        (0.5, 40, None, 0.25, "--mpp", True),  # contradictory metadata
        (None, 2, None, 0.25, "--mpp", True),  # an implausible power contradicts nothing, but differs
        (2.5, 36, None, 0.25, "--mpp", True),
    ],
)
def test_option_replaces_only_a_missing_or_implausible_scale(in_file, objective, in_table, mpp, source, warned):
    scale = resolve_scale(make_metadata(in_file, objective), in_table, 0.25)
    assert (scale.mpp, scale.source, bool(scale.warnings)) == (mpp, source, warned)


@pytest.mark.parametrize(("in_file", "objective"), [(0.00499, 20), (0.25, 20)])
def test_option_that_contradicts_the_objective_power_is_an_error(in_file, objective):
    with pytest.raises(ScaleError, match=r"20x usually means 0\.5") as error:
        resolve_scale(make_metadata(in_file, objective), None, 0.25)
    assert "column `mpp`" in error.value.hint


@pytest.mark.parametrize(
    ("mpp", "rejected"), [(0.25 * 1.69, False), (0.25 * 1.71, True), (0.25 / 1.69, False), (0.25 / 1.71, True)]
)
def test_mpp_and_objective_contradict_above_a_ratio_of_1_7(mpp, rejected):
    if rejected:
        with pytest.raises(ScaleError, match="contradict each other"):
            resolve_scale(make_metadata(mpp, 40))
    else:
        assert resolve_scale(make_metadata(mpp, 40)).warnings


@pytest.mark.parametrize(
    ("mpp", "warned"), [(0.5 * 1.149, False), (0.5 * 1.151, True), (0.5 * 0.851, False), (0.5 * 0.849, True)]
)
def test_warning_above_a_difference_of_15_percent(mpp, warned):
    assert bool(resolve_scale(make_metadata(mpp, 20)).warnings) == warned


def test_metadata_note_becomes_a_warning():
    with_note = replace(make_metadata(0.5), note="pixels are not square")
    assert resolve_scale(with_note).warnings == ("pixels are not square",)


@needs_real_slides
def test_real_slide_with_wrong_scale_is_rejected():
    with pytest.raises(ScaleError, match=r"0\.00499"):
        resolve_scale(open_slide(REAL / "CMU-1-Small-Region.jpeg.tiff").metadata)
    assert resolve_scale(open_slide(REAL / "CMU-1-Small-Region.jpeg.tiff").metadata, 0.499).mpp == 0.499

"""Noise that is evaluated in strips, and planted nuclei with the mean colour of normal ones."""

from dataclasses import replace

import numpy as np
import pytest

from tapfm.runtime.seeding import make_rng
from tapfm.synthetic.fields import enlarge_rows, make_noise, resize_field, sample_smooth_noise
from tapfm.synthetic.nuclei import EPITHELIAL, LOOKALIKES, MORPHOLOGIES, Nuclei, interpolate_kinds, render_nuclei
from tapfm.synthetic.nuclei import _locate_centres as locate_centres
from tapfm.synthetic.section import MAP_MPP
from tapfm.synthetic.section import _fill_with_nuclei as fill_with_nuclei


def test_each_rng_key_is_a_separate_random_stream():
    samples = [make_rng(*rng_key).random(4).tolist() for rng_key in [(0, "a"), (0, "b"), (1, "a"), ("0", "a"), ("0a",)]]
    assert len({tuple(each) for each in samples}) == len(samples)
    assert make_rng(0, "a").random(4).tolist() == samples[0]


def test_strips_of_noise_equal_the_whole_field():
    whole = make_noise(np.random.default_rng(0), (90, 70), 7.0)
    strips = [whole.render_rows(top, min(top + 32, 90), 70) for top in range(0, 90, 32)]
    np.testing.assert_allclose(
        np.vstack(strips), whole.render_rows(0, 90, 70), atol=0.05
    )  # cv2 rounds to 1/32 of a pixel


def test_smooth_noise_has_the_documented_standard_deviation():
    field = sample_smooth_noise(np.random.default_rng(0), (400, 400), 12.0)
    assert abs(field.mean()) < 0.1
    assert 1.1 < field.std() < 1.4


def test_enlarged_strips_equal_the_resized_field():
    field = sample_smooth_noise(np.random.default_rng(0), (40, 30), 9.0)
    strips = [enlarge_rows(field, 2, top, top + 20, 60) for top in range(0, 80, 20)]
    np.testing.assert_allclose(np.vstack(strips), resize_field(field, (80, 60)), atol=0.06)


def sample_nuclei(kind, count=60, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.normal(1, 0.05, count).astype(np.float32)
    positions = rng.uniform(20, 60, (2, count)).astype(np.float32)
    angles = rng.uniform(0, np.pi, count).astype(np.float32)
    return Nuclei("epithelium", kind, *positions, kind.length_um * sizes, kind.width_um * sizes, angles)


@pytest.mark.parametrize("mpp", [0.25, 0.5])
@pytest.mark.parametrize("name", [*MORPHOLOGIES, *LOOKALIKES])
def test_planted_nuclei_transmit_as_much_light_as_normal_ones(name, mpp):
    def light(kind):
        cover, density = render_nuclei(np.random.default_rng(1), sample_nuclei(kind, 300), mpp)
        inside = cover > 0.5
        return (np.exp(-density) * inside).sum((1, 2)) / inside.sum((1, 2))

    normal, planted = light(EPITHELIAL), light((MORPHOLOGIES | LOOKALIKES)[name])
    assert abs(planted.mean() - normal.mean()) < 0.012  # of 0.37


@pytest.mark.parametrize("name", [*MORPHOLOGIES, *LOOKALIKES])
def test_planted_nuclei_cover_the_same_area_as_normal_ones(name):
    mask, direction = np.ones((900, 900), bool), np.zeros((900, 900), np.float32)

    def covered(kind):
        nuclei = fill_with_nuclei(np.random.default_rng(0), "epithelium", kind, mask, direction)
        return float((np.pi / 4 * nuclei.length_um * nuclei.width_um).sum()) / (mask.size * MAP_MPP**2)

    assert covered((MORPHOLOGIES | LOOKALIKES)[name]) == pytest.approx(covered(EPITHELIAL), rel=0.07)


def test_planted_nuclei_have_the_properties_of_their_morphology():
    coarse = MORPHOLOGIES["coarse"]
    assert coarse.length_um * coarse.width_um > 1.5 * EPITHELIAL.length_um * EPITHELIAL.width_um
    _, normal = render_nuclei(np.random.default_rng(1), sample_nuclei(EPITHELIAL), 0.5)
    cover, clumped = render_nuclei(np.random.default_rng(1), sample_nuclei(LOOKALIKES["clumped"]), 0.5)
    inside = cover > 0.9
    assert clumped[inside].std() > 1.5 * normal[inside].std()
    spindle = MORPHOLOGIES["spindle"]
    assert spindle.length_um > 3 * spindle.width_um


def test_strength_interpolates_between_normal_and_planted():
    planted = MORPHOLOGIES["coarse"]
    assert interpolate_kinds(EPITHELIAL, planted, 0) == EPITHELIAL
    assert interpolate_kinds(EPITHELIAL, planted, 1).length_um == pytest.approx(planted.length_um)
    assert EPITHELIAL.length_um < interpolate_kinds(EPITHELIAL, planted, 0.5).length_um < planted.length_um


@pytest.mark.parametrize("mpp", [0.25, 0.5])
def test_rendered_nuclei_are_at_their_positions(mpp):
    nuclei = sample_nuclei(replace(EPITHELIAL, relative_size_sd=0.0), 40)
    cover, _ = render_nuclei(np.random.default_rng(0), nuclei, mpp)
    columns, rows, _, _ = locate_centres(nuclei, mpp)
    steps = np.arange(cover.shape[1]) - cover.shape[1] // 2
    total = cover.sum((1, 2))
    x_um = (columns + 0.5 + (cover.sum(1) * steps).sum(1) / total) * mpp
    y_um = (rows + 0.5 + (cover.sum(2) * steps).sum(1) / total) * mpp
    np.testing.assert_allclose(x_um, nuclei.x_um, atol=0.35)  # the irregular outline moves the centre of mass a little
    np.testing.assert_allclose(y_um, nuclei.y_um, atol=0.35)

"""Tissue is found, faint and fatty tissue too; glass, dust and padding are not."""

import cv2
import numpy as np
import pytest
from PIL import Image
from slide_files import EOSIN, GLASS, REAL, needs_real_slides

from tapfm.errors import UnknownNameError
from tapfm.slides.opening import open_slide
from tapfm.slides.tissue import _MASK_MPP as MASK_MPP
from tapfm.slides.tissue import TISSUE_METHODS, tissue_mask
from tapfm.slides.tissue import _otsu as otsu


def glass(height_px=250, width_px=300, seed=0):
    return np.full((height_px, width_px, 3), GLASS, np.float32) + np.random.default_rng(seed).normal(
        0, 1.5, (height_px, width_px, 3)
    )


def done(picture):
    return np.clip(picture, 0, 255).astype(np.uint8)


def stain(picture, top, left, side, colour, seed=1):
    rng = np.random.default_rng(seed)
    picture[top : top + side, left : left + side] = np.array(colour) + rng.normal(0, 8, (side, side, 1))


@pytest.mark.parametrize("method", TISSUE_METHODS)
def test_stained_tissue_is_found_to_its_edge(method):
    picture = glass()
    stain(picture, 50, 60, 100, EOSIN)
    mask = tissue_mask(done(picture), MASK_MPP, method)
    truth = np.zeros_like(mask)
    truth[50:150, 60:160] = True
    assert (mask & truth).sum() / (mask | truth).sum() > 0.9


@pytest.mark.parametrize("method", TISSUE_METHODS)
def test_glass_alone_has_no_tissue(method):
    assert not tissue_mask(done(glass()), MASK_MPP, method).any()


def test_faint_tissue_beside_strong_tissue_survives():
    picture = glass()
    stain(picture, 20, 20, 100, (170, 60, 130))
    picture[150:230, 150:230] = (236, 224, 231)  # 12 grades of 255 in saturation
    saturation = cv2.cvtColor(done(picture), cv2.COLOR_RGB2HSV)[..., 1]
    assert otsu(saturation.astype(np.float32)) > saturation[155:225, 155:225].mean()  # Otsu alone calls it glass
    mask = tissue_mask(done(picture), MASK_MPP)
    assert mask[155:225, 155:225].mean() > 0.95
    assert mask[:, 240:].mean() < 0.01


def test_fat_is_tissue_not_a_hundred_holes():
    picture = glass()
    # cells of 80 um with walls of 3 um, drawn at 1 um per pixel
    fine = np.full((960, 960, 3), GLASS, np.float32)
    for wall in (*range(0, 960, 80), 958):
        cv2.line(fine, (wall, 0), (wall, 959), EOSIN, 3)
        cv2.line(fine, (0, wall), (959, wall), EOSIN, 3)
    picture[60:180, 60:180] = cv2.resize(fine, (120, 120), interpolation=cv2.INTER_AREA)
    mask = tissue_mask(done(picture), MASK_MPP)
    assert mask[64:176, 64:176].mean() > 0.95
    assert mask.sum() < 1.15 * 120 * 120


def test_black_padding_is_no_tissue_even_where_compression_colours_it():
    picture = glass()
    picture[:, :90] = np.random.default_rng(2).uniform(0, 12, (250, 90, 3))  # saturated, if one divides by so little
    stain(picture, 100, 150, 80, EOSIN)
    mask = tissue_mask(done(picture), MASK_MPP)
    assert not mask[:, :90].any()
    assert mask[105:175, 155:225].all()


@pytest.mark.parametrize("method", ["otsu", "darkness"])
@pytest.mark.parametrize("colour", [(240, 238, 228), (242, 236, 205), (222, 224, 226), (226, 238, 230)])
@pytest.mark.parametrize("gap", [0, 170])
def test_tinted_glass_is_glass_also_beside_what_was_not_scanned(colour, gap, method):
    picture = glass() + (np.array(colour) - np.array(GLASS))
    stain(picture, 100, 200, 60, EOSIN)
    picture = done(picture)
    picture[:, :gap] = 255
    mask = tissue_mask(picture, MASK_MPP, method, unscanned=(255, 255, 255))
    assert mask[105:155, 205:255].all()
    assert mask.sum() < 1.3 * 60 * 60


def test_a_pale_flat_pool_on_white_glass_is_tissue():
    picture = np.full((250, 300, 3), 255, np.float32)
    stain(picture, 30, 30, 150, EOSIN)
    picture[60:90, 60:100] = (236, 196, 215)
    mask = tissue_mask(done(picture), MASK_MPP)
    assert mask[32:178, 32:178].all()


def test_pale_low_contrast_tissue_on_most_of_the_picture_is_tissue():
    picture = glass()
    picture[:, :210] = np.array((232, 205, 220)) + np.random.default_rng(3).normal(0, 1.5, (250, 210, 3))
    mask = tissue_mask(done(picture), MASK_MPP)
    assert mask[:, :208].mean() > 0.99
    assert mask[:, 215:].mean() < 0.01


def test_all_padding_is_no_tissue():
    assert not tissue_mask(np.zeros((50, 50, 3), np.uint8), MASK_MPP).any()


def test_a_slide_that_is_all_tissue_is_all_tissue():
    picture = np.array(EOSIN, np.float32) + np.random.default_rng(0).normal(0, 12, (100, 100, 1))
    assert tissue_mask(done(picture), MASK_MPP).mean() > 0.98


def test_specks_go_and_small_holes_are_filled_while_large_ones_stay():
    picture = glass()
    stain(picture, 40, 40, 160, EOSIN)
    picture[60:70, 60:70] = GLASS  # 0.006 mm2
    picture[100:150, 100:150] = GLASS  # 0.16 mm2
    picture[10:15, 250:255] = EOSIN  # dust
    mask = tissue_mask(done(picture), MASK_MPP)
    assert mask[60:70, 60:70].all()
    assert not mask[105:145, 105:145].any()
    assert not mask[5:20, 240:270].any()


def test_otsu_agrees_with_opencv():
    values = np.concatenate(
        [np.random.default_rng(0).normal(60, 10, 3000), np.random.default_rng(1).normal(170, 20, 1000)]
    )
    values = np.clip(values, 0, 255).astype(np.uint8)
    theirs, _ = cv2.threshold(values, 0, 255, cv2.THRESH_OTSU)
    assert abs(otsu(values.astype(np.float32)) - theirs) <= 2


def test_an_unknown_method_lists_them():
    with pytest.raises(UnknownNameError, match="otsu, darkness, texture"):
        tissue_mask(done(glass()), MASK_MPP, "magic")


@needs_real_slides
def test_a_real_core_biopsy_is_found_with_its_glands():
    with Image.open(REAL / "slide_with_ink.jpeg") as image:
        picture = np.asarray(image.convert("RGB").reduce(2))  # about 8 um per pixel
    mask = tissue_mask(picture, MASK_MPP)
    assert mask[200:260, 200:900].mean() > 0.5  # the long left part
    assert mask[:40].mean() < 0.01  # stitched glass of several greys
    assert mask[430:, :1700].mean() < 0.01  # what the scanner left white
    assert 0.15 < mask.mean() < 0.4


@needs_real_slides
@pytest.mark.parametrize("method", TISSUE_METHODS)
def test_real_skin_is_found_by_every_method(method):
    slide = open_slide(REAL / "CMU-1-Small-Region.svs")
    thumbnail = slide.thumbnail(185)
    mask = tissue_mask(thumbnail.pixels, MASK_MPP, method)
    assert 0.3 < mask.mean() < 0.55
    assert not mask[:, :5].all(axis=1).any()

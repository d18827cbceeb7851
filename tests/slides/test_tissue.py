"""Tissue detection: faint and fatty tissue is found; glass, dust and padding are not."""

import cv2
import numpy as np
import pytest
from PIL import Image
from slide_files import EOSIN, GLASS, REAL, needs_real_slides

from tapfm.errors import UnknownNameError
from tapfm.slides.opening import open_slide
from tapfm.slides.tissue import _MASK_MPP as MASK_MPP
from tapfm.slides.tissue import TISSUE_METHODS, detect_tissue
from tapfm.slides.tissue import _otsu_threshold as otsu_threshold


def make_glass(height_px=250, width_px=300, seed=0):
    return np.full((height_px, width_px, 3), GLASS, np.float32) + np.random.default_rng(seed).normal(
        0, 1.5, (height_px, width_px, 3)
    )


def to_uint8(image):
    return np.clip(image, 0, 255).astype(np.uint8)


def add_tissue(image, top, left, side, colour, seed=1):
    rng = np.random.default_rng(seed)
    image[top : top + side, left : left + side] = np.array(colour) + rng.normal(0, 8, (side, side, 1))


@pytest.mark.parametrize("method", TISSUE_METHODS)
def test_stained_tissue_is_detected(method):
    image = make_glass()
    add_tissue(image, 50, 60, 100, EOSIN)
    mask = detect_tissue(to_uint8(image), MASK_MPP, method)
    expected = np.zeros_like(mask)
    expected[50:150, 60:160] = True
    assert (mask & expected).sum() / (mask | expected).sum() > 0.9


@pytest.mark.parametrize("method", TISSUE_METHODS)
def test_glass_alone_has_no_tissue(method):
    assert not detect_tissue(to_uint8(make_glass()), MASK_MPP, method).any()


def test_faint_tissue_next_to_strong_tissue_is_detected():
    image = make_glass()
    add_tissue(image, 20, 20, 100, (170, 60, 130))
    image[150:230, 150:230] = (236, 224, 231)  # a saturation of 12 of 255
    saturation = cv2.cvtColor(to_uint8(image), cv2.COLOR_RGB2HSV)[..., 1]
    assert (
        otsu_threshold(saturation.astype(np.float32)) > saturation[155:225, 155:225].mean()
    )  # Otsu's threshold alone would miss it
    mask = detect_tissue(to_uint8(image), MASK_MPP)
    assert mask[155:225, 155:225].mean() > 0.95
    assert mask[:, 240:].mean() < 0.01


def test_fat_is_tissue_without_holes():
    image = make_glass()
    # cells of 80 um with walls of 3 um, drawn at 1 um per pixel
    fine = np.full((960, 960, 3), GLASS, np.float32)
    for wall in (*range(0, 960, 80), 958):
        cv2.line(fine, (wall, 0), (wall, 959), EOSIN, 3)
        cv2.line(fine, (0, wall), (959, wall), EOSIN, 3)
    image[60:180, 60:180] = cv2.resize(fine, (120, 120), interpolation=cv2.INTER_AREA)
    mask = detect_tissue(to_uint8(image), MASK_MPP)
    assert mask[64:176, 64:176].mean() > 0.95
    assert mask.sum() < 1.15 * 120 * 120


def test_black_padding_with_compression_noise_is_not_tissue():
    image = make_glass()
    image[:, :90] = np.random.default_rng(2).uniform(
        0, 12, (250, 90, 3)
    )  # high saturation because of the low brightness
    add_tissue(image, 100, 150, 80, EOSIN)
    mask = detect_tissue(to_uint8(image), MASK_MPP)
    assert not mask[:, :90].any()
    assert mask[105:175, 155:225].all()


@pytest.mark.parametrize("method", ["otsu", "darkness"])
@pytest.mark.parametrize("colour", [(240, 238, 228), (242, 236, 205), (222, 224, 226), (226, 238, 230)])
@pytest.mark.parametrize("gap", [0, 170])
def test_tinted_glass_is_not_tissue(colour, gap, method):
    image = make_glass() + (np.array(colour) - np.array(GLASS))
    add_tissue(image, 100, 200, 60, EOSIN)
    image = to_uint8(image)
    image[:, :gap] = 255
    mask = detect_tissue(image, MASK_MPP, method, unscanned=(255, 255, 255))
    assert mask[105:155, 205:255].all()
    assert mask.sum() < 1.3 * 60 * 60


def test_pale_flat_region_on_white_glass_is_tissue():
    image = np.full((250, 300, 3), 255, np.float32)
    add_tissue(image, 30, 30, 150, EOSIN)
    image[60:90, 60:100] = (236, 196, 215)
    mask = detect_tissue(to_uint8(image), MASK_MPP)
    assert mask[32:178, 32:178].all()


def test_pale_low_contrast_tissue_on_most_of_the_image_is_tissue():
    image = make_glass()
    image[:, :210] = np.array((232, 205, 220)) + np.random.default_rng(3).normal(0, 1.5, (250, 210, 3))
    mask = detect_tissue(to_uint8(image), MASK_MPP)
    assert mask[:, :208].mean() > 0.99
    assert mask[:, 215:].mean() < 0.01


def test_image_of_padding_has_no_tissue():
    assert not detect_tissue(np.zeros((50, 50, 3), np.uint8), MASK_MPP).any()


def test_image_full_of_tissue():
    image = np.array(EOSIN, np.float32) + np.random.default_rng(0).normal(0, 12, (100, 100, 1))
    assert detect_tissue(to_uint8(image), MASK_MPP).mean() > 0.98


def test_dust_is_removed_and_small_holes_are_filled():
    image = make_glass()
    add_tissue(image, 40, 40, 160, EOSIN)
    image[60:70, 60:70] = GLASS  # 0.006 mm2
    image[100:150, 100:150] = GLASS  # 0.16 mm2
    image[10:15, 250:255] = EOSIN  # dust
    mask = detect_tissue(to_uint8(image), MASK_MPP)
    assert mask[60:70, 60:70].all()
    assert not mask[105:145, 105:145].any()
    assert not mask[5:20, 240:270].any()


def test_otsu_agrees_with_opencv():
    values = np.concatenate(
        [np.random.default_rng(0).normal(60, 10, 3000), np.random.default_rng(1).normal(170, 20, 1000)]
    )
    values = np.clip(values, 0, 255).astype(np.uint8)
    reference, _ = cv2.threshold(values, 0, 255, cv2.THRESH_OTSU)
    assert abs(otsu_threshold(values.astype(np.float32)) - reference) <= 2


def test_unknown_method_lists_all_methods():
    with pytest.raises(UnknownNameError, match="otsu, darkness, texture"):
        detect_tissue(to_uint8(make_glass()), MASK_MPP, "magic")


@needs_real_slides
def test_real_core_biopsy_is_detected():
    with Image.open(REAL / "slide_with_ink.jpeg") as file:
        image = np.asarray(file.convert("RGB").reduce(2))  # about 8 um per pixel
    mask = detect_tissue(image, MASK_MPP)
    assert mask[200:260, 200:900].mean() > 0.5  # the long left part
    assert mask[:40].mean() < 0.01  # glass of several stitched scans
    assert mask[430:, :1700].mean() < 0.01  # not scanned
    assert 0.15 < mask.mean() < 0.4


@needs_real_slides
@pytest.mark.parametrize("method", TISSUE_METHODS)
def test_real_skin_is_detected_by_every_method(method):
    slide = open_slide(REAL / "CMU-1-Small-Region.svs")
    thumbnail = slide.thumbnail(185)
    mask = detect_tissue(thumbnail.pixels, MASK_MPP, method)
    assert 0.3 < mask.mean() < 0.55
    assert not mask[:, :5].all(axis=1).any()

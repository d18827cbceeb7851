"""Detection of pen marks and blur on generated and real tissue."""

import cv2
import numpy as np
import pytest
from PIL import Image
from slide_files import EOSIN, GLASS, REAL, needs_real_slides

from tapfm.slides.opening import open_slide
from tapfm.slides.quality import FOCUS_MPP, detect_blur, detect_pen
from tapfm.slides.quality import _sharpness as sharpness
from tapfm.slides.tissue import _MASK_MPP as MASK_MPP

COLON = REAL.parent / "tiles" / "crc" / "train"
PENS = {
    "blue": (30, 60, 170),
    "green": (20, 130, 70),
    "red": (215, 25, 40),
    "black": (45, 44, 48),
    "pitch black": (6, 5, 8),
}
TISSUE = {
    "eosin": EOSIN,
    "strong eosin": (214, 84, 140),
    "haematoxylin": (112, 74, 150),
    "dark nuclei": (70, 45, 105),
    "blood": (200, 70, 95),
    "blood in another scanner": (196, 62, 66),
    "blue haematoxylin": (104, 104, 172),
    "DAB": (120, 60, 30),
    "dark DAB": (70, 42, 22),
    "melanin": (74, 52, 44),
    "dark melanin": (50, 35, 30),
    "pale blue haematoxylin": (140, 155, 195),
    "lymphocytes": (80, 90, 150),
    "deep blood": (190, 45, 60),
    "faint": (236, 222, 230),
    "glass": GLASS,
    "grey dust": (150, 150, 150),
}


def is_out_of_focus(tile):
    return bool(detect_blur(tile[np.newaxis])[0])


def draw_stroke(colour):
    image = np.full((200, 200, 3), EOSIN, np.uint8)
    cv2.line(image, (20, 20), (180, 170), colour, 14)
    return image


@pytest.mark.parametrize("name", PENS)
def test_pen_stroke_is_detected(name):
    image = draw_stroke(PENS[name])
    mask = detect_pen(image, MASK_MPP)
    ink = (image == PENS[name]).all(axis=2)
    assert mask[ink].all()
    assert mask.sum() < 2.2 * ink.sum()


@pytest.mark.parametrize("name", TISSUE)
def test_tissue_of_any_colour_is_not_detected_as_pen(name):
    assert not detect_pen(draw_stroke(TISSUE[name]), MASK_MPP).any()


def test_scanner_padding_and_its_edge_are_not_detected_as_pen():
    fine = np.full((1600, 1600, 3), EOSIN, np.uint8)
    fine[:, :403] = 0
    image = cv2.resize(fine, (200, 200), interpolation=cv2.INTER_AREA)
    assert len(np.unique(image[0, :, 0])) == 3  # including a column of mixed pixels
    assert not detect_pen(image, MASK_MPP).any()


def test_small_region_of_pen_colour_is_not_detected():
    image = np.full((200, 200, 3), EOSIN, np.uint8)
    image[50:60, 50:60] = PENS["green"]  # surgical ink at a margin
    assert not detect_pen(image, MASK_MPP).any()


@needs_real_slides
def test_blue_ink_on_a_real_biopsy_is_detected():
    with Image.open(REAL / "slide_with_ink.jpeg") as file:
        image = np.asarray(file.convert("RGB").reduce(2))
    mask = detect_pen(image, MASK_MPP)
    assert mask[410:450, 1890:1960].mean() > 0.95  # the blue spot
    assert not mask[:, :1750].any()
    assert not mask[:, 2150:].any()


@needs_real_slides
@pytest.mark.parametrize("blur_um", [0, 3, 4, 6, 10])
def test_blur_of_real_skin_is_detected(blur_um):
    slide = open_slide(REAL / "CMU-1-Small-Region.svs")
    pixels = slide.read_level(0, 0, 0, slide.metadata.width_px0, slide.metadata.height_px0)
    if blur_um:
        pixels = cv2.GaussianBlur(pixels, (0, 0), blur_um / slide.metadata.mpp_in_file)
    side_px = 224
    focus_px = round(side_px * slide.metadata.mpp_in_file / FOCUS_MPP)
    blurred = [
        is_out_of_focus(
            cv2.resize(pixels[y : y + side_px, x : x + side_px], (focus_px,) * 2, interpolation=cv2.INTER_AREA)
        )
        for y in range(1200, 2700, side_px)
        for x in range(900, 1500, side_px)
    ]
    assert np.mean(blurred) == (1 if blur_um else 0)


@pytest.mark.skipif(not COLON.exists(), reason=f"no real tiles in {COLON}")
@pytest.mark.parametrize("blur_um", [0, 3])
@pytest.mark.parametrize("kind", ["AC", "H", "S", "T", "V"])
def test_blur_of_real_colon_is_detected(kind, blur_um):
    blurred = []
    for path in sorted((COLON / kind).glob("*.webp"))[:40]:
        with Image.open(path) as image:
            tile = np.asarray(image.convert("RGB"))  # 112 um on 160 pixels
        if blur_um:
            tile = cv2.GaussianBlur(tile, (0, 0), blur_um / 0.7)
        blurred.append(is_out_of_focus(cv2.resize(tile, (56, 56), interpolation=cv2.INTER_AREA)))
    assert np.mean(blurred) == (1 if blur_um else 0)


def test_result_does_not_depend_on_the_batch():
    image = np.random.default_rng(0).integers(0, 256, (700, 600, 3), np.uint8)
    sigmas = np.linspace(0.1, 3, 30)
    tiles = [
        cv2.GaussianBlur(image, (0, 0), sigma)[20 * i : 20 * i + 57, 17 * i : 17 * i + 43]
        for i, sigma in enumerate(sigmas)
    ]
    together = sharpness(np.stack(tiles))
    assert together.tolist() == [float(sharpness(tile[np.newaxis])[0]) for tile in tiles]
    blurred = detect_blur(np.stack(tiles)).tolist()
    assert blurred == [is_out_of_focus(tile) for tile in tiles]
    assert blurred == sorted(blurred)
    assert 0 < sum(blurred) < len(tiles)


def test_flat_tile_is_not_detected_as_blurred():
    assert np.isnan(sharpness(np.full((1, 56, 56, 3), EOSIN, np.uint8)))
    assert not is_out_of_focus(np.full((56, 56, 3), EOSIN, np.uint8))


def test_camera_noise_is_not_detected_as_blur():
    noise = np.clip(np.array(GLASS) + np.random.default_rng(0).normal(0, 4, (56, 56, 3)), 0, 255).astype(np.uint8)
    assert not is_out_of_focus(noise)

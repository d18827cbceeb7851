"""What should not be learned from: pen marks, and tissue that is out of focus."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from tapfm.slides.slide import Pixels
from tapfm.slides.tissue import Mask, padding_mask, small_pieces

# A pen mark is larger than this; single cells and pigment have such colours too.
_SMALLEST_PEN_UM2 = 10_000.0
_PEN_FRINGE_UM = 40.0  # ink thins out at its edge: that much around it is left out as well

FOCUS_MPP = 2.0  # um per pixel at which sharpness is judged: nuclei are 3 to 5 pixels there
# Squared differences of pixels 1 apart over those 4 apart: 1/16 on a smooth slope, 1 in noise. Sharp skin and colon lie
# above this limit, and below it when blurred by a Gaussian of 3 um or more (tests/slides/test_quality.py).
_SHARP = 0.135
_LEAST_CONTRAST = 8.0  # of grey level squared; flatter tiles have nothing to judge


def pen_mask(pixels: Pixels, mpp: float) -> Mask:
    """Find ink of blue, green, red and black pens in a picture of `mpp` microns per pixel.

    Made for haematoxylin and eosin, which span hues from blue-violet to pink (270 to 350 degrees); pens lie outside,
    or are far more saturated, or have no colour at all. Other stains (Masson, alcian blue) have the colours of pens.
    """
    hsv = cv2.cvtColor(cv2.medianBlur(pixels, 3), cv2.COLOR_RGB2HSV).astype(np.int16)
    hue_degrees, saturation, value = 2 * hsv[..., 0], hsv[..., 1], hsv[..., 2]
    # haematoxylin can be blue, but not as saturated as ink
    blue = (hue_degrees >= 190) & (hue_degrees <= 245) & (saturation >= np.where(hue_degrees <= 228, 110, 130))
    green = (hue_degrees >= 80) & (hue_degrees < 190) & (saturation >= 80)
    # lakes of blood are red, DAB is brown; ink is redder and purer than both
    red = ((hue_degrees >= 350) | (hue_degrees <= 8)) & (saturation >= 205) & (value >= 150)
    # melanin is dark too, with more colour; coal dust in a lung cannot be told from a black pen
    black = (value <= 80) & (saturation * value <= 14 * 255)
    # where padding meets tissue, both mix to something that looks like ink
    padding = cv2.dilate(padding_mask(pixels).astype(np.uint8), np.ones((7, 7), np.uint8)).astype(bool)
    ink = (blue | green | red | black) & ~padding
    ink &= ~small_pieces(ink, _SMALLEST_PEN_UM2 / mpp**2)
    fringe_px = max(1, round(_PEN_FRINGE_UM / mpp))
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * fringe_px + 1, 2 * fringe_px + 1))
    return np.asarray(cv2.dilate(ink.astype(np.uint8), disc).astype(bool))


def _sharpness(tiles: Pixels) -> NDArray[np.float64]:
    """Measure how sharp each of (n, height, width, 3) tiles of FOCUS_MPP is, whatever its contrast; NaN where flat."""
    count, height_px, width_px, _ = tiles.shape
    grey = cv2.cvtColor(tiles.reshape(count * height_px, width_px, 3), cv2.COLOR_RGB2GRAY)
    planes = grey.reshape(count, height_px, width_px).astype(np.float32)
    near, far = _difference(planes, 1), _difference(planes, 4)
    return np.divide(near, far, out=np.full(count, np.nan), where=far >= _LEAST_CONTRAST)


def _difference(planes: NDArray[np.float32], apart_px: int) -> NDArray[np.float64]:
    """Mean squared difference of pixels `apart_px` apart, down and across, of each plane."""
    down = planes[:, apart_px:] - planes[:, :-apart_px]
    across = planes[:, :, apart_px:] - planes[:, :, :-apart_px]
    # squares of whole numbers are summed exactly: a tile measures the same alone and among others
    sums = [(each * each).mean(axis=(1, 2), dtype=np.float64) for each in (down, across)]
    return np.asarray(sums[0] + sums[1])


def blurred(tiles: Pixels) -> Mask:
    """Say which of (n, height, width, 3) tiles of FOCUS_MPP are blurred beyond use."""
    return np.asarray(_sharpness(tiles) < _SHARP)

"""Quality control: detection of pen marks and of tiles that are out of focus."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from tapfm.slides.slide import Pixels
from tapfm.slides.tissue import Mask, detect_padding, find_small_components

# Smaller regions of pen colours are ignored: cells and pigment can have the same colours.
_MIN_PEN_UM2 = 10_000.0
_PEN_FRINGE_UM = 40.0  # ink fades at its edge; this margin around it is excluded too

FOCUS_MPP = 2.0  # um per pixel at which sharpness is measured; a nucleus is 3 to 5 pixels wide
# Ratio of the mean squared differences of pixels 1 and 4 apart: 1/16 on a smooth gradient, 1 in noise. Sharp skin and
# colon are above this threshold, and below it after a Gaussian blur of 3 um or more (tests/slides/test_quality.py).
_MIN_SHARPNESS = 0.135
_MIN_CONTRAST = 8.0  # squared grey levels; tiles with less contrast are not classified


def detect_pen(pixels: Pixels, mpp: float) -> Mask:
    """Return a mask of blue, green, red and black ink in an image of `mpp` microns per pixel.

    Designed for H&E, whose hues range from blue-violet to pink (270 to 350 degrees). Ink has other hues, is far more
    saturated, or is achromatic. Other stains (Masson, alcian blue) contain pen colours and give false positives.
    """
    hsv = cv2.cvtColor(cv2.medianBlur(pixels, 3), cv2.COLOR_RGB2HSV).astype(np.int16)
    hue_degrees, saturation, value = 2 * hsv[..., 0], hsv[..., 1], hsv[..., 2]
    # haematoxylin can be blue, but not as saturated as ink
    blue = (hue_degrees >= 190) & (hue_degrees <= 245) & (saturation >= np.where(hue_degrees <= 228, 110, 130))
    green = (hue_degrees >= 80) & (hue_degrees < 190) & (saturation >= 80)
    # blood is red and DAB is brown; red ink is redder and more saturated than both
    red = ((hue_degrees >= 350) | (hue_degrees <= 8)) & (saturation >= 205) & (value >= 150)
    # melanin is dark too, but more saturated; anthracotic pigment in lung cannot be distinguished from black ink
    black = (value <= 80) & (saturation * value <= 14 * 255)
    # the mixed pixels between padding and tissue look like ink
    padding = cv2.dilate(detect_padding(pixels).astype(np.uint8), np.ones((7, 7), np.uint8)).astype(bool)
    ink = (blue | green | red | black) & ~padding
    ink &= ~find_small_components(ink, _MIN_PEN_UM2 / mpp**2)
    fringe_px = max(1, round(_PEN_FRINGE_UM / mpp))
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * fringe_px + 1, 2 * fringe_px + 1))
    return np.asarray(cv2.dilate(ink.astype(np.uint8), disc).astype(bool))


def _sharpness(tiles: Pixels) -> NDArray[np.float64]:
    """Return the sharpness of (n, height, width, 3) tiles at FOCUS_MPP, independent of contrast; NaN for flat tiles."""
    count, height_px, width_px, _ = tiles.shape
    grey = cv2.cvtColor(tiles.reshape(count * height_px, width_px, 3), cv2.COLOR_RGB2GRAY)
    planes = grey.reshape(count, height_px, width_px).astype(np.float32)
    near, far = _mean_squared_difference(planes, 1), _mean_squared_difference(planes, 4)
    return np.divide(near, far, out=np.full(count, np.nan), where=far >= _MIN_CONTRAST)


def _mean_squared_difference(planes: NDArray[np.float32], distance_px: int) -> NDArray[np.float64]:
    """Return, for each plane, the mean squared vertical plus the mean squared horizontal difference at a distance."""
    vertical = planes[:, distance_px:] - planes[:, :-distance_px]
    horizontal = planes[:, :, distance_px:] - planes[:, :, :-distance_px]
    # Squares of integers are summed exactly, so the result does not depend on the batch size.
    sums = [(each * each).mean(axis=(1, 2), dtype=np.float64) for each in (vertical, horizontal)]
    return np.asarray(sums[0] + sums[1])


def detect_blur(tiles: Pixels) -> Mask:
    """Return which of (n, height, width, 3) tiles at FOCUS_MPP are out of focus."""
    return np.asarray(_sharpness(tiles) < _MIN_SHARPNESS)

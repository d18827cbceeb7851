"""Tissue detection on a thumbnail of the slide.

The paper uses Otsu's threshold on saturation. For real slides this module adds limits that keep faintly stained tissue,
closes gaps in fat, fills holes, and removes small components and black scanner padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import cv2
import numpy as np
from numpy.typing import NDArray

from tapfm.errors import UnknownNameError
from tapfm.slides.slide import Colour, Pixels

Mask = NDArray[np.bool_]
Plane = NDArray[np.float32]

_MASK_MPP = 8.0  # um per pixel of the thumbnail; a tile of 112 um covers 14 x 14 of its pixels
_PADDING_VALUE = 30  # maximum of the brightest channel of scanner padding; stained tissue is brighter
# Glass, tinted glass included, is brighter and less saturated than this, and has less local contrast than tissue.
_GLASS_VALUE, _GLASS_SATURATION, _GLASS_CONTRAST = 180, 60, 3.0
_MIN_GLASS_FRACTION = 0.1  # of the scanned area; with less glass its saturation is not estimated
_MAX_GAP_UM = 24.0  # gaps up to this size are closed; fat is a net of thin walls
_MAX_HOLE_UM2 = 40_000.0  # holes up to this area are filled: fat cells, small vessels
_MIN_TISSUE_UM2 = 10_000.0  # smaller components are removed as dust


def _find_dark_pixels(pixels: Pixels) -> Mask:
    """Return a mask of pixels that are too dark for stained tissue, dilated by one pixel for compression artefacts."""
    brightest = cv2.max(cv2.max(pixels[..., 0], pixels[..., 1]), pixels[..., 2])  # much faster than pixels.max(2)
    dark = (brightest < _PADDING_VALUE).astype(np.uint8)
    return cv2.dilate(dark, np.ones((3, 3), np.uint8)).astype(bool)


def detect_padding(pixels: Pixels) -> Mask:
    """Return a mask of black scanner padding: dark regions that touch the edge of the image."""
    dark = _find_dark_pixels(pixels)
    _, labels = cv2.connectedComponents(dark.astype(np.uint8), connectivity=8)
    at_edge = np.unique(np.concatenate([labels[0], labels[-1], labels[:, 0], labels[:, -1]]))
    return np.isin(labels, at_edge[at_edge > 0])


def detect_tissue(pixels: Pixels, mpp: float, method: str = "otsu", unscanned: Colour | None = None) -> Mask:
    """Return a tissue mask of an image of `mpp` microns per pixel.

    method: one of TISSUE_METHODS. unscanned: colour of areas that were not scanned. Pixels of exactly this colour
    are not used to estimate the threshold, and are tissue only in gaps that are closed and small holes that are filled.
    """
    if method not in TISSUE_METHODS:
        raise UnknownNameError.with_suggestions("tissue method", method, TISSUE_METHODS, see=", ".join(TISSUE_METHODS))
    dark = _find_dark_pixels(pixels)
    scanned = ~dark if unscanned is None else ~dark & (pixels != unscanned).any(axis=2)
    if not scanned.any():
        return np.zeros(dark.shape, bool)
    return _clean_mask(TISSUE_METHODS[method](pixels, scanned) & scanned, mpp) & ~dark


def _segment_by_saturation(pixels: Pixels, scanned: Mask) -> Mask:
    """Segment by Otsu's threshold on saturation, limited so that faintly stained tissue is kept."""
    hsv = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV)
    saturation = _smooth(hsv[..., 1])
    flat = _local_contrast(hsv[..., 2]) <= _GLASS_CONTRAST
    glass = scanned & flat & (hsv[..., 2] >= _GLASS_VALUE) & (hsv[..., 1] <= _GLASS_SATURATION)
    # a low percentile: flat tissue may be classified as glass, but it is more saturated than glass
    level = float(np.percentile(saturation[glass], 10)) if glass.sum() >= _MIN_GLASS_FRACTION * scanned.sum() else 0.0
    # Saturation of glass varies by a few of 255 levels. Faint tissue starts about ten levels above it, which is often
    # below Otsu's threshold.
    return saturation >= np.clip(_otsu_threshold(saturation[scanned]), level + 6, level + 9)


def _segment_by_darkness(pixels: Pixels, scanned: Mask) -> Mask:
    """Segment by Otsu's threshold on optical density, for stains with little colour."""
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY).astype(np.float32)
    glass = max(float(np.percentile(grey[scanned], 95)), 1.0)
    density = _smooth(255 * np.log10(glass / np.clip(grey, 1, glass)))
    return density >= np.clip(_otsu_threshold(density[scanned]), 8, 14)


def _segment_by_texture(pixels: Pixels, scanned: Mask) -> Mask:
    """Segment by Otsu's threshold on local contrast, for unstained or bleached tissue."""
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY).astype(np.float32)
    grey[~scanned] = np.median(grey[scanned])
    contrast = _local_contrast(grey)
    return contrast >= np.clip(_otsu_threshold(contrast[scanned]), 2.5, 5)


TISSUE_METHODS: dict[str, Callable[[Pixels, Mask], Mask]] = {
    "otsu": _segment_by_saturation,
    "darkness": _segment_by_darkness,
    "texture": _segment_by_texture,
}


def _local_contrast(plane: NDArray[np.generic]) -> Plane:
    """Return the standard deviation in windows of 5 x 5 pixels."""
    values = plane.astype(np.float32)
    mean = cv2.blur(values, (5, 5))
    return np.asarray(np.sqrt(np.maximum(cv2.blur(values * values, (5, 5)) - mean * mean, 0)))


def _smooth(plane: NDArray[np.generic]) -> Plane:
    """Reduce noise but keep structures of one pixel."""
    return np.asarray(cv2.GaussianBlur(plane.astype(np.float32), (0, 0), 0.8))


def _otsu_threshold(values: Plane) -> float:
    """Return Otsu's threshold, which maximises the between-class variance of the histogram."""
    counts, edges = np.histogram(values, bins=256)
    centres = (edges[:-1] + edges[1:]) / 2
    below = np.cumsum(counts)
    above = below[-1] - below
    sum_below = np.cumsum(counts * centres)
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = sum_below / below - (sum_below[-1] - sum_below) / above
        between = np.where((below > 0) & (above > 0), below * above * apart**2, 0.0)
    return float(edges[int(between.argmax()) + 1])


def _clean_mask(mask: Mask, mpp: float) -> Mask:
    """Close gaps, fill small holes and remove small components."""
    radius_px = max(1, round(_MAX_GAP_UM / mpp / 2))
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * radius_px + 1, 2 * radius_px + 1))
    # without the border, closing would erode tissue at the edge of the image
    frame = (radius_px, radius_px, radius_px, radius_px)
    framed = cv2.copyMakeBorder(mask.astype(np.uint8), *frame, cv2.BORDER_REPLICATE)
    closed = cv2.morphologyEx(framed, cv2.MORPH_CLOSE, disc)[radius_px:-radius_px, radius_px:-radius_px].astype(bool)
    filled = closed | find_small_components(~closed, _MAX_HOLE_UM2 / mpp**2)
    return filled & ~find_small_components(filled, _MIN_TISSUE_UM2 / mpp**2)


def find_small_components(mask: Mask, smaller_than_px: float, connectivity: int = 8) -> Mask:
    """Return a mask of the connected components with fewer than `smaller_than_px` pixels.

    connectivity: 8, or 4 if pixels that share only a corner are not connected.
    """
    _, labels, statistics, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=connectivity)
    small = statistics[:, cv2.CC_STAT_AREA] < smaller_than_px
    small[0] = False  # label 0 is the background
    return np.asarray(small[labels], dtype=bool)


def tissue_thumbnail_px(longest_px0: float, mpp: float) -> int:
    """Return the longer side of the thumbnail for tissue detection; `longest_px0` is that of the scanned area."""
    return max(1, min(math.ceil(longest_px0), round(longest_px0 * mpp / _MASK_MPP)))

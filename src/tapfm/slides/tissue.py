"""Where the tissue is, from a small picture of the slide.

The paper's filter is Otsu's threshold on saturation. Around it stands what it lacks on real slides: the threshold is
kept low enough for faint tissue, gaps of fat are closed, holes filled, specks and black scanner padding left out.
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

_MASK_MPP = 8.0  # um per pixel of the picture that is segmented: a tile of 112 um has 14 x 14 of them
_PADDING_VALUE = 30  # brightest channel of what scanners put where they did not scan; stained tissue is brighter
# Glass is brighter and paler than this, also where it is tinted, and flatter than tissue.
_GLASS_VALUE, _GLASS_SATURATION, _GLASS_CONTRAST = 180, 60, 3.0
_GLASS_SHARE = 0.1  # of the picture, below which there is no glass to learn from
_GAP_UM = 24.0  # fat is a net of thin walls: gaps in them up to this are closed
_HOLE_UM2 = 40_000.0  # holes up to this are filled: fat cells, small vessels
_SPECK_UM2 = 10_000.0  # pieces below this are dust


def _dark_mask(pixels: Pixels) -> Mask:
    """Find what is too dark to be stained tissue, with the seam that compression smears around it."""
    brightest = cv2.max(cv2.max(pixels[..., 0], pixels[..., 1]), pixels[..., 2])  # far faster than pixels.max(2)
    dark = (brightest < _PADDING_VALUE).astype(np.uint8)
    return cv2.dilate(dark, np.ones((3, 3), np.uint8)).astype(bool)


def padding_mask(pixels: Pixels) -> Mask:
    """Find black scanner padding: dark, and reaching to the edge of the picture."""
    dark = _dark_mask(pixels)
    _, labels = cv2.connectedComponents(dark.astype(np.uint8), connectivity=8)
    at_edge = np.unique(np.concatenate([labels[0], labels[-1], labels[:, 0], labels[:, -1]]))
    return np.isin(labels, at_edge[at_edge > 0])


def tissue_mask(pixels: Pixels, mpp: float, method: str = "otsu", unscanned: Colour | None = None) -> Mask:
    """Find tissue in a picture of `mpp` microns per pixel, by one of METHODS.

    Pixels of exactly the colour `unscanned` are where the scanner did not look: neither tissue nor glass to learn from.
    """
    if method not in METHODS:
        raise UnknownNameError.of("tissue method", method, METHODS, see=", ".join(METHODS))
    dark = _dark_mask(pixels)
    seen = ~dark if unscanned is None else ~dark & (pixels != unscanned).any(axis=2)
    if not seen.any():
        return np.zeros(dark.shape, bool)
    return _tidy(METHODS[method](pixels, seen) & seen, mpp) & ~dark


def _by_saturation(pixels: Pixels, seen: Mask) -> Mask:
    """Separate by colour: Otsu on saturation, but never so high that faintly stained tissue is lost."""
    hsv = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV)
    saturation = _smooth(hsv[..., 1])
    flat = _local_contrast(hsv[..., 2]) <= _GLASS_CONTRAST
    glass = seen & flat & (hsv[..., 2] >= _GLASS_VALUE) & (hsv[..., 1] <= _GLASS_SATURATION)
    # the palest of it: flat tissue may be among what looks like glass, and is never paler
    level = float(np.percentile(saturation[glass], 10)) if glass.sum() >= _GLASS_SHARE * seen.sum() else 0.0
    # Glass varies by a few of 255 grades; faint tissue begins some ten above it, which Otsu would often call glass.
    return saturation >= np.clip(_otsu(saturation[seen]), level + 6, level + 9)


def _by_darkness(pixels: Pixels, seen: Mask) -> Mask:
    """Separate by light: Otsu on optical density; for stains without much colour."""
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY).astype(np.float32)
    glass = max(float(np.percentile(grey[seen], 95)), 1.0)
    density = _smooth(255 * np.log10(glass / np.clip(grey, 1, glass)))
    return density >= np.clip(_otsu(density[seen]), 8, 14)


def _by_texture(pixels: Pixels, seen: Mask) -> Mask:
    """Separate by structure: Otsu on local contrast; for unstained or bleached tissue."""
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY).astype(np.float32)
    grey[~seen] = np.median(grey[seen])
    contrast = _local_contrast(grey)
    return contrast >= np.clip(_otsu(contrast[seen]), 2.5, 5)


METHODS: dict[str, Callable[[Pixels, Mask], Mask]] = {
    "otsu": _by_saturation,
    "darkness": _by_darkness,
    "texture": _by_texture,
}


def _local_contrast(plane: NDArray[np.generic]) -> Plane:
    """Measure the standard deviation in windows of 5 x 5 pixels."""
    values = plane.astype(np.float32)
    mean = cv2.blur(values, (5, 5))
    return np.asarray(np.sqrt(np.maximum(cv2.blur(values * values, (5, 5)) - mean * mean, 0)))


def _smooth(plane: NDArray[np.generic]) -> Plane:
    """Take the noise off, keeping walls of one pixel."""
    return np.asarray(cv2.GaussianBlur(plane.astype(np.float32), (0, 0), 0.8))


def _otsu(values: Plane) -> float:
    """Find Otsu's threshold: the cut of the histogram with the largest variance between its two sides."""
    counts, edges = np.histogram(values, bins=256)
    centres = (edges[:-1] + edges[1:]) / 2
    below = np.cumsum(counts)
    above = below[-1] - below
    sum_below = np.cumsum(counts * centres)
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = sum_below / below - (sum_below[-1] - sum_below) / above
        between = np.where((below > 0) & (above > 0), below * above * apart**2, 0.0)
    return float(edges[int(between.argmax()) + 1])


def _tidy(mask: Mask, mpp: float) -> Mask:
    """Close gaps, fill holes, remove specks."""
    radius_px = max(1, round(_GAP_UM / mpp / 2))
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * radius_px + 1, 2 * radius_px + 1))
    # without the border the closing would eat tissue at the picture's edge
    frame = (radius_px, radius_px, radius_px, radius_px)
    framed = cv2.copyMakeBorder(mask.astype(np.uint8), *frame, cv2.BORDER_REPLICATE)
    closed = cv2.morphologyEx(framed, cv2.MORPH_CLOSE, disc)[radius_px:-radius_px, radius_px:-radius_px].astype(bool)
    filled = closed | small_pieces(~closed, _HOLE_UM2 / mpp**2)
    return filled & ~small_pieces(filled, _SPECK_UM2 / mpp**2)


def small_pieces(mask: Mask, smaller_than_px: float, connectivity: int = 8) -> Mask:
    """Find connected pieces with fewer pixels than that; with a connectivity of 4 corners do not connect."""
    _, labels, statistics, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=connectivity)
    small = statistics[:, cv2.CC_STAT_AREA] < smaller_than_px
    small[0] = False  # what is not in the mask
    return np.asarray(small[labels], dtype=bool)


def mask_side_px(side_px0: float, mpp: float) -> int:
    """Say how many pixels of MASK_MPP a length of level-0 pixels has; at least one, at most its own."""
    return max(1, min(math.ceil(side_px0), round(side_px0 * mpp / _MASK_MPP)))

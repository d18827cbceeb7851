"""Compute the pixels of a scanned slide from its stain amounts: stain colours, scanner properties and artefacts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

from tapfm.runtime.seeding import make_rng
from tapfm.slides.slide import Pixels
from tapfm.slides.tissue import Mask
from tapfm.synthetic.fields import enlarge_rows, resize_field, sample_smooth_noise
from tapfm.synthetic.section import MAP_MPP
from tapfm.synthetic.stain_rendering import StainAmounts

RgbValues: TypeAlias = tuple[float, float, float]  # red, green, blue
PenColour: TypeAlias = Literal["blue", "green", "black"]

# fraction of red, green and blue light that the ink of a pen transmits
_INK_TRANSMISSION: dict[PenColour, RgbValues] = {
    "blue": (0.16, 0.27, 0.72),
    "green": (0.12, 0.55, 0.30),
    "black": (0.09, 0.09, 0.10),
}
_STRIP_PX = 128  # number of rows rendered at once


@dataclass(frozen=True)
class StainingProtocol:
    """Colours and strengths of the stains of a laboratory.

    A colour is the optical density of one unit of a stain in red, green and blue.
    A strength is the factor by which the amounts of a stain are multiplied. Blood has the strength 1.
    """

    haematoxylin_colour: RgbValues = (0.59, 0.72, 0.37)
    eosin_colour: RgbValues = (0.11, 0.87, 0.48)
    blood_colour: RgbValues = (0.09, 0.95, 0.76)
    haematoxylin_strength: float = 1.45
    eosin_strength: float = 0.95


@dataclass(frozen=True)
class Scanner:
    """Properties of a scanner. `name`, `mpp`, `objective` and `jpeg_quality` are also written to the slide file."""

    name: str
    mpp: float
    objective: int  # magnification of the objective: 20 or 40
    white: RgbValues = (243.0, 242.0, 243.0)  # colour of empty glass, 0 to 255
    blur_um: float = 0.32  # standard deviation of the point spread function
    sharpening: float = 0.0  # factor of unsharp masking; 0: none
    noise: float = 1.3  # standard deviation of the noise, in pixel values (0 to 255)
    jpeg_quality: int = 80


@dataclass(frozen=True)
class Artefacts:
    """Artefacts to add to a slide."""

    folds: int = 0  # number of tissue folds
    blurred_region_radius_um: float = 0.0  # approximate radius of a region out of focus; 0: no such region
    pen: PenColour | None = None  # colour of a pen mark; None: no pen mark
    dust_particles: int = 0


@dataclass(frozen=True)
class Scan:
    """A scanned slide. Pixels have the mpp of the scanner. Masks of artefacts have MAP_MPP microns per pixel."""

    pixels: Pixels
    fold_mask: Mask
    blur_mask: Mask  # tissue that is fully out of focus
    pen_mask: Mask


def vary_stain_colour(colour: RgbValues, rng: np.random.Generator, spread: float) -> RgbValues:
    """Return a random variation of the colour of a stain, scaled to the same Euclidean norm as `colour`.

    spread: standard deviation of the change of each component, before the scaling.
    """
    varied = np.clip(np.array(colour) + rng.normal(0, spread, 3), 0.02, None)
    red, green, blue = varied * np.linalg.norm(colour) / np.linalg.norm(varied)
    return float(red), float(green), float(blue)


def scan_section(
    stains: StainAmounts,
    tissue: Mask,
    staining: StainingProtocol,
    scanner: Scanner,
    artefacts: Artefacts,
    *rng_key: int | str,
) -> Scan:
    """Render the pixels of a section as a scanner records them; the same arguments give the same pixels.

    stains: at the mpp of the scanner. tissue: with MAP_MPP microns per pixel.
    """
    rng = make_rng(*rng_key, "accidents")
    fold_mask, shift_um = _sample_folds(rng, tissue, artefacts.folds)
    if fold_mask.any():
        stains = _apply_folds(stains, fold_mask, (round(shift_um[0] / scanner.mpp), round(shift_um[1] / scanner.mpp)))
    pixels = _render_pixels(stains, staining, scanner, make_rng(*rng_key, "noise"))
    blur_mask = np.zeros_like(tissue)
    if artefacts.blurred_region_radius_um > 0 and tissue.any():
        blur_mask = _blur_region(rng, pixels, tissue, artefacts.blurred_region_radius_um, scanner.mpp)
    pen_mask = np.zeros_like(tissue)
    if artefacts.pen is not None and tissue.any():
        pen_mask = _draw_pen(rng, pixels, tissue, artefacts.pen)
    _draw_dust(rng, pixels, artefacts.dust_particles, scanner.mpp)
    return Scan(pixels, fold_mask, blur_mask, pen_mask)


def _render_pixels(
    stains: StainAmounts, staining: StainingProtocol, scanner: Scanner, rng: np.random.Generator
) -> Pixels:
    """Compute the transmitted light (Beer-Lambert law), with the blur, sharpening and noise of the scanner."""
    height, width = stains.eosin.shape
    pixels = np.empty((height, width, 3), np.uint8)
    densities = [
        np.float32(strength) * np.array(colour, np.float32)
        for strength, colour in (
            (staining.haematoxylin_strength, staining.haematoxylin_colour),
            (staining.eosin_strength, staining.eosin_colour),
            (1.0, staining.blood_colour),
        )
    ]
    illumination = 1 + 0.006 * sample_smooth_noise(rng, (height // 16 + 2, width // 16 + 2), 60)
    noise_tile = rng.normal(0, scanner.noise, (_STRIP_PX, 512, 3)).astype(np.float32)
    noise = np.tile(noise_tile, (1, -(-width // 512), 1))[:, :width]
    sigma_px, margin = scanner.blur_um / scanner.mpp, 8  # margin: rows above and below a strip, for the blur
    for top in range(0, height, _STRIP_PX):
        bottom = min(top + _STRIP_PX, height)
        first, last = max(top - margin, 0), min(bottom + margin, height)
        rows = np.s_[first:last]
        strip = np.empty((last - first, width, 3), np.float32)
        for channel in range(3):
            density = stains.haematoxylin[rows] * densities[0][channel]
            density += stains.eosin[rows] * densities[1][channel]
            density += stains.blood[rows] * densities[2][channel]
            strip[..., channel] = np.float32(scanner.white[channel]) * np.exp(-density)
        strip = cv2.GaussianBlur(strip, (0, 0), sigma_px)
        if scanner.sharpening > 0:
            blurred = cv2.GaussianBlur(strip, (0, 0), 1.2)
            strip += np.float32(scanner.sharpening) * (strip - blurred)
        strip = strip[top - first : bottom - first]
        strip *= enlarge_rows(illumination, 16, top, bottom, width)[..., None]
        strip += noise[: bottom - top]
        pixels[top:bottom] = np.clip(strip, 0, 255).astype(np.uint8)
    return pixels


def _sample_folds(rng: np.random.Generator, tissue: Mask, count: int) -> tuple[Mask, tuple[float, float]]:
    """Sample folds, where a second layer of tissue lies on the first.

    Return one mask of all folds, and the shift (x, y) of the second layer in microns, which is the same in all folds.
    """
    canvas = np.zeros(tissue.shape, np.uint8)
    rows, columns = np.nonzero(tissue)
    for _ in range(count if len(rows) else 0):
        chosen = int(rng.integers(len(rows)))
        points = _sample_curve(rng, columns[chosen], rows[chosen], length=rng.uniform(150, 420), bend=0.6)
        cv2.polylines(canvas, [points], False, 1, int(rng.uniform(12, 26)))
    return np.asarray(canvas.astype(bool) & tissue), (rng.uniform(30, 70), rng.uniform(30, 70))


def _sample_curve(
    rng: np.random.Generator, middle_x: float, middle_y: float, length: float, bend: float
) -> npt.NDArray[np.int32]:
    """Sample a curve with its middle at (middle_x, middle_y); return its points (x, y).

    middle_x, middle_y, length: in pixels of the image that the curve is drawn on.
    bend: standard deviation of the angle by which the curve turns from start to end, in radians. A small random wave
        is added.
    """
    angle, turn = rng.uniform(0, 2 * np.pi), rng.normal(0, bend)
    steps = np.linspace(-0.5, 0.5, 24)
    angles = angle + turn * steps + 0.25 * np.sin(steps * rng.uniform(4, 9))
    points = np.cumsum(np.stack([np.cos(angles), np.sin(angles)], 1) * length / 24, 0)
    return np.rint(points - points[12] + (middle_x, middle_y)).astype(np.int32)


def _apply_folds(stains: StainAmounts, fold_mask: Mask, shift_px: tuple[int, int]) -> StainAmounts:
    """Return the stain amounts with a second layer of tissue in the folds.

    The amounts of the second layer are 75% of those of the tissue that is shifted by `shift_px` (x, y) into the fold,
    plus 25% of those of the first layer.
    """
    height, width = stains.eosin.shape
    weight = resize_field(cv2.GaussianBlur(fold_mask.astype(np.float32), (0, 0), 1.0), (height, width))
    left, top, box_width, box_height = cv2.boundingRect((weight > 0).astype(np.uint8))
    folded = np.s_[top : top + box_height, left : left + box_width]
    shifted = np.ix_(
        (np.arange(top, top + box_height) - shift_px[1]) % height,
        (np.arange(left, left + box_width) - shift_px[0]) % width,
    )
    planes = [plane.copy() for plane in (stains.haematoxylin, stains.eosin, stains.blood)]
    for plane in planes:
        plane[folded] += weight[folded] * (np.float32(0.75) * plane[shifted] + np.float32(0.25) * plane[folded])
    return StainAmounts(*planes)


def _blur_region(rng: np.random.Generator, pixels: Pixels, tissue: Mask, radius_um: float, mpp: float) -> Mask:
    """Blur a random, roughly round region of `pixels` in place; return a mask of the fully blurred tissue."""
    rows, columns = np.nonzero(tissue)
    chosen = int(rng.integers(len(rows)))
    y, x = np.mgrid[0 : tissue.shape[0], 0 : tissue.shape[1]].astype(np.float32)
    inside = (
        radius_um / MAP_MPP
        - np.hypot(x - columns[chosen], y - rows[chosen])
        + 25 * sample_smooth_noise(rng, tissue.shape, 160)
    )
    weight = np.clip(inside / 30, 0, 1)
    scale = MAP_MPP / mpp
    box = cv2.boundingRect((weight > 0).astype(np.uint8))
    left, top, right, bottom = (int(v * scale) for v in (box[0], box[1], box[0] + box[2], box[1] + box[3]))
    part = pixels[top:bottom, left:right]
    blurred = cv2.GaussianBlur(part, (0, 0), rng.uniform(3.2, 4.5) / mpp)
    alpha = resize_field(weight[box[1] : box[1] + box[3], box[0] : box[0] + box[2]], part.shape[:2])[..., None]
    part[:] = (part + alpha * (blurred.astype(np.float32) - part)).astype(np.uint8)
    return np.asarray((weight >= 1) & tissue)


def _draw_pen(rng: np.random.Generator, pixels: Pixels, tissue: Mask, pen: PenColour) -> Mask:
    """Draw a stroke of a marker pen at the edge of the tissue, in place; return a mask of the stroke."""
    edge = tissue & ~cv2.erode(tissue.astype(np.uint8), np.ones((5, 5), np.uint8)).astype(bool)
    rows, columns = np.nonzero(edge)
    chosen = int(rng.integers(len(rows)))
    canvas = np.zeros(tissue.shape, np.uint8)
    cv2.polylines(
        canvas,
        [_sample_curve(rng, columns[chosen], rows[chosen], length=rng.uniform(350, 800), bend=1.6)],
        False,
        255,
        int(rng.uniform(70, 130)),
        cv2.LINE_AA,
    )
    # the density of the ink varies and its edge is streaky
    amount = cv2.GaussianBlur(canvas, (0, 0), 2.0).astype(np.float32) / 255
    amount *= np.clip(
        0.88 + 0.10 * sample_smooth_noise(rng, tissue.shape, 60) + 0.05 * sample_smooth_noise(rng, tissue.shape, 7),
        0,
        1,
    )
    alpha = resize_field(amount, pixels.shape[:2])
    for channel in range(3):
        plane = pixels[..., channel]
        plane[:] = (plane * (1 - alpha * np.float32(1 - _INK_TRANSMISSION[pen][channel]))).astype(np.uint8)
    return canvas > 127


def _draw_dust(rng: np.random.Generator, pixels: Pixels, count: int, mpp: float) -> None:
    """Draw `count` dust particles or dust fibres in place. They are blurred, because they lie above the focal plane."""
    height, width = pixels.shape[:2]
    for _ in range(count):
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        margin_um = 60.0
        left, top = int(max(x - margin_um / mpp, 0)), int(max(y - margin_um / mpp, 0))
        part = pixels[top : int(y + margin_um / mpp), left : int(x + margin_um / mpp)]
        canvas = np.zeros(part.shape[:2], np.uint8)
        centre = x - left, y - top
        if rng.random() < 0.3:
            points = _sample_curve(rng, *centre, length=rng.uniform(25, 75) / mpp, bend=2.5)
            cv2.polylines(canvas, [points], False, 255, max(1, round(1.6 / mpp)), cv2.LINE_AA)
        else:
            axes = rng.uniform(1.5, 7, 2) / mpp
            cv2.ellipse(canvas, (centre, (2 * axes[0], 2 * axes[1]), rng.uniform(0, 180)), 255, -1)
        alpha = cv2.GaussianBlur(canvas, (0, 0), 1.2 / mpp).astype(np.float32)[..., None] / 255
        colour = np.array([70, 66, 72]) * rng.uniform(0.6, 1.5)
        part[:] = (part + alpha * np.float32(0.85) * (colour.astype(np.float32) - part)).astype(np.uint8)

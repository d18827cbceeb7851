"""Smooth random fields: outlines, compartments, fibres and chromatin are all made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

Field: TypeAlias = npt.NDArray[np.float32]
Shape: TypeAlias = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Noise:
    """Smooth make_noise that can be drawn strip by strip; `step_px` pixels from knot to knot."""

    knots: Field
    step_px: float
    shift_xy: tuple[float, float]

    def rows(self, top: int, bottom: int, width: int) -> Field:
        """Draw some rows of the field: mean 0, deviation about 1.2."""
        scale, (shift_x, shift_y) = 1 / self.step_px, self.shift_xy
        to_knots = np.array([[scale, 0, 1 + shift_x], [0, scale, 1 + shift_y + top * scale]], np.float64)
        flags = cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP
        drawn = cv2.warpAffine(self.knots, to_knots, (width, bottom - top), flags=flags)
        drawn *= np.float32(1.45)  # interpolation averages; all strengths were chosen with this height
        return np.asarray(drawn, np.float32)


def make_noise(rng: np.random.Generator, shape_hw: Shape, wavelength_px: float) -> Noise:
    """Lay the knots of a field whose hills are about half a wavelength apart."""
    step = max(wavelength_px / 2, 1.0)
    height, width = (int(np.ceil(side / step)) + 4 for side in shape_hw)
    knots = rng.standard_normal((height, width), dtype=np.float32)
    # a shift by a part of the step keeps the hills of two fields from standing on one grid
    shift_x, shift_y = rng.uniform(0, 1, 2)
    return Noise(knots, step, (float(shift_x), float(shift_y)))


def smooth_noise(rng: np.random.Generator, shape_hw: Shape, wavelength_px: float) -> Field:
    """Draw a whole field of smooth make_noise."""
    return make_noise(rng, shape_hw, wavelength_px).rows(0, *shape_hw)


def rough_noise(
    rng: np.random.Generator, shape_hw: Shape, wavelength_px: float, octaves: int = 3, fall: float = 0.5
) -> Field:
    """Add octaves of smooth make_noise, each of half the wavelength and `fall` times the height of the one before."""
    total = np.zeros(shape_hw, np.float32)
    for octave in range(octaves):
        total += np.float32(fall**octave) * smooth_noise(rng, shape_hw, wavelength_px / 2**octave)
    return total / np.float32(np.sqrt(sum(fall ** (2 * octave) for octave in range(octaves))))


def resize_field(field: Field, shape_hw: Shape) -> Field:
    """Bring a field to another grid over the same area."""
    if field.shape == shape_hw:
        return field
    return np.asarray(cv2.resize(field, shape_hw[::-1], interpolation=cv2.INTER_LINEAR), np.float32)


def enlarge_rows(field: Field, times: float, top: int, bottom: int, width: int) -> Field:
    """Draw some rows of a field enlarge_rows `times`, as `resize_field` would the whole."""
    scale = 1 / times
    to_field = np.array([[scale, 0, scale / 2 - 0.5], [0, scale, (top + 0.5) * scale - 0.5]], np.float64)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    drawn = cv2.warpAffine(field, to_field, (width, bottom - top), flags=flags, borderMode=cv2.BORDER_REPLICATE)
    return np.asarray(drawn, np.float32)


def soft_step(field: Field, width: float) -> Field:
    """Rise from 0 to 1 around the field's zero, within about `width`."""
    return np.clip(field / np.float32(width) + np.float32(0.5), 0, 1)


def distance_inside(mask: npt.NDArray[np.bool_]) -> Field:
    """Measure how many pixels each pixel of the mask is from its outside."""
    padded = cv2.copyMakeBorder(mask.astype(np.uint8), 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    return np.asarray(cv2.distanceTransform(padded, cv2.DIST_L2, 5)[1:-1, 1:-1], np.float32)


def wavy_coordinates(
    rng: np.random.Generator, shape_hw: Shape, bend_px: float, wavelength_px: float
) -> tuple[Field, Field]:
    """Lay coordinates along and across draw_fibres that run through the field in bent, parallel lines, in pixels."""
    height, width = shape_hw
    angle = rng.uniform(0, np.pi)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    cosine, sine = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    bend = [np.float32(bend_px) * rough_noise(rng, shape_hw, wavelength_px, 3, 0.4) for _ in range(2)]
    return cosine * x + sine * y + bend[0], cosine * y - sine * x + bend[1]


def draw_fibres(sheet: Field, along: Field, across: Field, length_px: float, thickness_px: float) -> Field:
    """Draw a sheet of make_noise out along the draw_fibres: fibres of a length and a thickness, as high as the sheet."""
    along, across = along * np.float32(2 / length_px), across * np.float32(2 / thickness_px)
    # reflected at its edges, so that no seam shows where the sheet is used up
    return np.asarray(cv2.remap(sheet, along, across, cv2.INTER_LINEAR, None, cv2.BORDER_REFLECT_101), np.float32)

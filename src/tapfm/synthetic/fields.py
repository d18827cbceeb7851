"""Smooth random fields (maps of random values), from which outlines, compartments, fibres and chromatin are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

Float32Array: TypeAlias = npt.NDArray[np.float32]
Shape: TypeAlias = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Noise:
    """Smooth noise that can be evaluated in strips of rows: random values on a coarse grid, interpolated."""

    grid: Float32Array  # (rows, columns): standard normal random values
    grid_spacing_px: float  # distance between grid points, in pixels of the rendered rows
    shift_xy: tuple[float, float]  # offset of the grid, as a fraction of `grid_spacing_px`

    def render_rows(self, top: int, bottom: int, width: int) -> Float32Array:
        """Return the rows from `top` to `bottom` (exclusive). Mean 0, standard deviation about 1.2."""
        scale, (shift_x, shift_y) = 1 / self.grid_spacing_px, self.shift_xy
        to_grid = np.array([[scale, 0, 1 + shift_x], [0, scale, 1 + shift_y + top * scale]], np.float64)
        flags = cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP
        values = cv2.warpAffine(self.grid, to_grid, (width, bottom - top), flags=flags)
        values *= np.float32(1.45)  # interpolation reduces the standard deviation from 1 to about 0.85
        return np.asarray(values, np.float32)


def make_noise(rng: np.random.Generator, shape_hw: Shape, wavelength_px: float) -> Noise:
    """Sample smooth noise with a wavelength of about `wavelength_px`, for an image of `shape_hw` pixels."""
    spacing_px = max(wavelength_px / 2, 1.0)
    height, width = (int(np.ceil(side / spacing_px)) + 4 for side in shape_hw)
    grid = rng.standard_normal((height, width), dtype=np.float32)
    # a random shift, so that the grids of two fields do not coincide
    shift_x, shift_y = rng.uniform(0, 1, 2)
    return Noise(grid, spacing_px, (float(shift_x), float(shift_y)))


def sample_smooth_noise(rng: np.random.Generator, shape_hw: Shape, wavelength_px: float) -> Float32Array:
    """Sample smooth noise and return it as an array of `shape_hw`. Mean 0, standard deviation about 1.2."""
    return make_noise(rng, shape_hw, wavelength_px).render_rows(0, *shape_hw)


def sample_rough_noise(
    rng: np.random.Generator, shape_hw: Shape, wavelength_px: float, octaves: int = 3, persistence: float = 0.5
) -> Float32Array:
    """Sample a sum of octaves of smooth noise.

    Each octave has half the wavelength and `persistence` times the amplitude of the previous octave. The sum is scaled
    to mean 0 and a standard deviation of about 1.2, like smooth noise.
    """
    total = np.zeros(shape_hw, np.float32)
    for octave in range(octaves):
        total += np.float32(persistence**octave) * sample_smooth_noise(rng, shape_hw, wavelength_px / 2**octave)
    return total / np.float32(np.sqrt(sum(persistence ** (2 * octave) for octave in range(octaves))))


def resize_field(field: Float32Array, shape_hw: Shape) -> Float32Array:
    """Resize a field to another shape by linear interpolation."""
    if field.shape == shape_hw:
        return field
    return np.asarray(cv2.resize(field, shape_hw[::-1], interpolation=cv2.INTER_LINEAR), np.float32)


def enlarge_rows(field: Float32Array, factor: float, top: int, bottom: int, width: int) -> Float32Array:
    """Resize a field by `factor` as `resize_field` does, but return only rows `top` to `bottom` (exclusive)."""
    scale = 1 / factor
    to_field = np.array([[scale, 0, scale / 2 - 0.5], [0, scale, (top + 0.5) * scale - 0.5]], np.float64)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    rows = cv2.warpAffine(field, to_field, (width, bottom - top), flags=flags, borderMode=cv2.BORDER_REPLICATE)
    return np.asarray(rows, np.float32)


def linear_ramp(field: Float32Array, width: float) -> Float32Array:
    """Map values below -width / 2 to 0 and values above width / 2 to 1; linear in between."""
    return np.clip(field / np.float32(width) + np.float32(0.5), 0, 1)


def distance_inside(mask: npt.NDArray[np.bool_]) -> Float32Array:
    """Return the distance of each pixel inside the mask to the nearest pixel outside it, in pixels; 0 outside the mask.

    The area beyond the edges of the array counts as outside.
    """
    padded = cv2.copyMakeBorder(mask.astype(np.uint8), 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    return np.asarray(cv2.distanceTransform(padded, cv2.DIST_L2, 5)[1:-1, 1:-1], np.float32)


def fibre_coordinates(
    rng: np.random.Generator, shape_hw: Shape, bend_px: float, wavelength_px: float
) -> tuple[Float32Array, Float32Array]:
    """Return the coordinates of each pixel along and across wavy, parallel fibres, in pixels.

    The fibres have a random direction. Their waves have an amplitude of about `bend_px`.
    """
    height, width = shape_hw
    angle = rng.uniform(0, np.pi)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    cosine, sine = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    bend = [np.float32(bend_px) * sample_rough_noise(rng, shape_hw, wavelength_px, 3, 0.4) for _ in range(2)]
    return cosine * x + sine * y + bend[0], cosine * y - sine * x + bend[1]


def render_fibres(
    texture: Float32Array, along: Float32Array, across: Float32Array, length_px: float, thickness_px: float
) -> Float32Array:
    """Render fibres: stretch a noise texture along the fibres.

    along, across: coordinates of each pixel, see `fibre_coordinates`.
    length_px: length of two texture pixels along the fibres, after stretching.
    thickness_px: thickness of two texture pixels across the fibres, after stretching.
    """
    along, across = along * np.float32(2 / length_px), across * np.float32(2 / thickness_px)
    # the texture is reflected at its edges, so that the repeated texture has no seams
    return np.asarray(cv2.remap(texture, along, across, cv2.INTER_LINEAR, None, cv2.BORDER_REFLECT_101), np.float32)

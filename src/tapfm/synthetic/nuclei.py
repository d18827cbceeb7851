"""Kinds of nuclei, morphologies of the planted signal, and rendering of nuclei.

A morphology changes the size, shape, chromatin or arrangement of nuclei, but not the mean colour of the tissue: larger
nuclei have a larger spacing, so that nuclei cover about the same area, and the texture of a nucleus does not change the
mean light that the nucleus transmits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tapfm.synthetic.fields import Float32Array, sample_smooth_noise


@dataclass(frozen=True)
class NucleusKind:
    """Appearance of one kind of nuclei."""

    length_um: float  # mean length
    width_um: float  # mean width
    spacing_um: float  # mean distance between the positions of neighbours; a position has one nucleus or a pair
    haematoxylin: float = 1.0  # mean optical density, before it is multiplied by the staining strength of the slide
    relative_size_sd: float = 0.12  # standard deviation of the size of nuclei, as a fraction of the mean size
    grain: float = 0.16  # amplitude of the chromatin texture, relative to the mean density
    clumping: float = 0.0  # 0: fine chromatin, 1: coarse clumps
    margination: float = 0.15  # 0: even chromatin, near 1: chromatin at the membrane and a clear centre
    nucleolus_density: float = 0.0  # density of the nucleolus, relative to the mean density; 0: no nucleolus
    paired_fraction: float = 0.0  # fraction of positions with two touching nuclei
    alignment: float = 0.0  # 0: random orientation, 1: parallel to the local direction of the tissue

    @property
    def max_radius_um(self) -> float:
        """Approximate upper bound of the distance from the centre of a nucleus to its edge."""
        return 0.5 * self.length_um * (1 + 3.2 * self.relative_size_sd) * 1.25


EPITHELIAL = NucleusKind(9.6, 7.6, 11.0, haematoxylin=1.0, alignment=0.4)
STROMAL = NucleusKind(12.0, 3.2, 17.0, haematoxylin=1.1, relative_size_sd=0.26, alignment=0.93)
LYMPHOCYTE = NucleusKind(6.2, 5.8, 7.3, haematoxylin=1.5, relative_size_sd=0.07, grain=0.25, clumping=0.5)
ENDOTHELIAL = NucleusKind(10.0, 2.8, 5.0, haematoxylin=1.15, alignment=1.0)

# Morphologies of targets, by name, at full strength (see `interpolate_kinds`).
MORPHOLOGIES = {
    "coarse": replace(
        EPITHELIAL, length_um=12.6, width_um=10.4, spacing_um=14.7, grain=0.42, clumping=1.0, nucleolus_density=1.3
    ),
    "vesicular": replace(EPITHELIAL, length_um=11.2, width_um=9.6, spacing_um=13.4, grain=0.1, margination=0.85),
    "spindle": replace(EPITHELIAL, length_um=16.5, width_um=4.5, spacing_um=10.8, alignment=1.0),
    "paired": replace(EPITHELIAL, spacing_um=15.4, paired_fraction=1.0),
}
# Morphologies that resemble "coarse" either only in size or only in chromatin. They can occur in positive and negative
# slides.
LOOKALIKES = {
    "large": replace(EPITHELIAL, length_um=12.6, width_um=10.4, spacing_um=14.7),
    "clumped": replace(EPITHELIAL, grain=0.42, clumping=1.0, nucleolus_density=0.6),
}


def interpolate_kinds(normal: NucleusKind, planted: NucleusKind, strength: float) -> NucleusKind:
    """Interpolate between two kinds of nuclei: strength 0 returns `normal`, strength 1 returns `planted`."""
    values = {
        name: getattr(normal, name) + strength * (getattr(planted, name) - getattr(normal, name))
        for name in NucleusKind.__dataclass_fields__
    }
    return NucleusKind(**values)


@dataclass(frozen=True)
class Nuclei:
    """Positions, sizes and orientations of nuclei of one kind. Each array has one value per nucleus."""

    group: str  # name of this group of nuclei, for example "stroma"; part of the key of its random stream
    kind: NucleusKind
    x_um: Float32Array  # centres, from the upper left corner of the section
    y_um: Float32Array
    length_um: Float32Array  # in the direction of `angle_rad`
    width_um: Float32Array  # perpendicular to the length
    angle_rad: Float32Array  # direction of the length; 0: right, pi / 2: down

    def __len__(self) -> int:
        return len(self.x_um)

    def __getitem__(self, rows: slice) -> Nuclei:
        arrays = (self.x_um, self.y_um, self.length_um, self.width_um, self.angle_rad)
        return Nuclei(self.group, self.kind, *(array[rows] for array in arrays))


def render_nuclei(rng: np.random.Generator, nuclei: Nuclei, mpp: float) -> tuple[Float32Array, Float32Array]:
    """Render each nucleus as a small square image; return coverage (0 to 1) and optical density, each (n, side, side).

    The centre of the nucleus is in the central pixel of its image. The pixels of the images are aligned with those of
    the slide.
    """
    kind, count = nuclei.kind, len(nuclei)
    half_px = int(np.ceil(kind.max_radius_um / mpp)) + 1
    _, _, offset_x, offset_y = _locate_centres(nuclei, mpp)
    pixels_um = np.arange(-half_px, half_px + 1, dtype=np.float32) * np.float32(mpp)
    dx = pixels_um[None, None, :] - offset_x[:, None, None]
    dy = pixels_um[None, :, None] - offset_y[:, None, None]
    cosine, sine = np.cos(nuclei.angle_rad)[:, None, None], np.sin(nuclei.angle_rad)[:, None, None]
    u = (cosine * dx + sine * dy) / (nuclei.length_um[:, None, None] / 2)
    v = (cosine * dy - sine * dx) / (nuclei.width_um[:, None, None] / 2)
    radius = np.sqrt(u * u + v * v)  # 1 at the edge of the nucleus
    # an irregular ellipse: second and third harmonics of the angle, computed without arctan2
    nonzero_radius = radius + np.float32(1e-3)
    cos1, sin1 = u / nonzero_radius, v / nonzero_radius
    cos2, sin2 = cos1 * cos1 - sin1 * sin1, 2 * cos1 * sin1
    cos3, sin3 = cos2 * cos1 - sin2 * sin1, sin2 * cos1 + cos2 * sin1
    dents = rng.normal(0, 0.05, (4, count, 1, 1)).astype(np.float32)
    radius /= 1 + dents[0] * cos2 + dents[1] * sin2 + dents[2] * cos3 + dents[3] * sin3
    mean_radius_um = (np.sqrt(nuclei.length_um * nuclei.width_um) / 2)[:, None, None]
    edge_um = np.float32(max(0.9, mpp))  # width of the soft edge
    cover = np.clip((1 - radius) * mean_radius_um / edge_um + 0.5, 0, 1)
    return cover, _render_chromatin(rng, kind, radius, cover, mpp)


def _render_chromatin(
    rng: np.random.Generator, kind: NucleusKind, radius: Float32Array, cover: Float32Array, mpp: float
) -> Float32Array:
    """Return the optical density of nuclei with a chromatin texture that does not change the mean transmitted light.

    radius: distance of each pixel from the centre of the nucleus; 1 at the edge. cover: coverage, see `render_nuclei`.
    """
    count, side = len(radius), radius.shape[1]
    # sampled before anything that depends on mpp, so that the mean densities are the same at every mpp
    target_density = (kind.haematoxylin * np.clip(rng.normal(1, 0.17, count), 0.55, 1.6)).astype(np.float32)
    fine, coarse = _make_texture(rng, 0.9 / mpp), _make_texture(rng, 2.8 / mpp)
    rows = rng.integers(0, fine.shape[0] - side, count)[:, None, None] + np.arange(side)[None, :, None]
    columns = rng.integers(0, fine.shape[1] - side, count)[:, None, None] + np.arange(side)[None, None, :]
    texture = fine[rows, columns]
    if kind.clumping > 0:
        texture = (1 - kind.clumping) * texture + kind.clumping * 1.2 * np.tanh(1.6 * coarse[rows, columns])
    density = 1 + np.float32(kind.grain) * texture
    rim = np.exp(-(((radius - 0.9) / 0.16) ** 2))
    centre = np.clip(1.15 - radius, 0, 1)
    density += np.float32(kind.margination) * (np.float32(1.1) * rim - centre)
    if kind.nucleolus_density > 0:
        # a dot with a random offset from the centre
        shift = rng.uniform(-0.35, 0.35, (2, count, 1, 1)).astype(np.float32)
        span = np.linspace(-1, 1, side, dtype=np.float32) * np.float32(side * mpp / 2)
        dot_x = span[None, None, :] - shift[0] * np.float32(kind.width_um / 2)
        dot_y = span[None, :, None] - shift[1] * np.float32(kind.width_um / 2)
        density += np.float32(kind.nucleolus_density) * np.exp(-(dot_x**2 + dot_y**2) / np.float32(2 * 0.85**2))
    density = np.maximum(density, np.float32(0.12))
    # A textured nucleus transmits more light than a uniform one of the same mean density (Jensen's inequality).
    # Three steps of the Newton method find the scale that compensates for the additional light.
    inside = cover > 0.5
    weight = inside.sum((1, 2)).astype(np.float32) + np.float32(1e-6)
    scale = target_density[:, None, None].copy()
    for _ in range(3):
        light = np.exp(-density * scale) * inside
        mean = light.sum((1, 2)) / weight
        slope = (light * density).sum((1, 2)) / weight
        scale += ((mean - np.exp(-target_density)) / (slope + 1e-6))[:, None, None]
    return density * scale


def _make_texture(rng: np.random.Generator, grain_px: float) -> Float32Array:
    """Sample noise with grains of about `grain_px` pixels. The wavelength of the noise is twice the grain size."""
    return sample_smooth_noise(rng, (384, 384), max(2.0, 2 * grain_px))


def _locate_centres(nuclei: Nuclei, mpp: float) -> tuple[np.ndarray, np.ndarray, Float32Array, Float32Array]:
    """Return column and row of the pixel that contains the centre of each nucleus, and the position x, y in this pixel.

    The position of the centre of the nucleus is relative to the centre of the pixel, in microns.
    """
    column, row = np.floor(nuclei.x_um / mpp).astype(int), np.floor(nuclei.y_um / mpp).astype(int)
    offset_x = (nuclei.x_um - (column + 0.5) * mpp).astype(np.float32)
    offset_y = (nuclei.y_um - (row + 0.5) * mpp).astype(np.float32)
    return column, row, offset_x, offset_y


def composite_nuclei(
    haematoxylin: Float32Array,
    eosin: Float32Array,
    nuclei: Nuclei,
    cover: Float32Array,
    density: Float32Array,
    mpp: float,
    eosin_fraction: float,
) -> None:
    """Draw rendered nuclei into the maps of stain amounts, in place.

    Nuclei replace the haematoxylin and multiply the eosin by `eosin_fraction`. `cover` and `density` are those of
    `render_nuclei`.
    """
    half = cover.shape[1] // 2
    columns, rows, _, _ = _locate_centres(nuclei, mpp)
    height, width = haematoxylin.shape
    for column, row, alpha, value in zip(columns, rows, cover, density, strict=True):
        top, left = max(row - half, 0), max(column - half, 0)
        bottom, right = min(row + half + 1, height), min(column + half + 1, width)
        if top >= bottom or left >= right:
            continue
        part = np.s_[top - row + half : bottom - row + half, left - column + half : right - column + half]
        haematoxylin_part = haematoxylin[top:bottom, left:right]
        haematoxylin_part += alpha[part] * (value[part] - haematoxylin_part)
        eosin_part = eosin[top:bottom, left:right]
        eosin_part *= 1 - (1 - np.float32(eosin_fraction)) * alpha[part]

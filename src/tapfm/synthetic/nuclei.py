"""Kinds of nuclei, morphologies of the planted signal, and rendering of nuclei.

A morphology changes size, shape, chromatin or arrangement of nuclei, but never the mean colour. Larger nuclei have a
larger spacing, so that the covered area is the same. The texture of a nucleus does not change its mean
transmitted light.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tapfm.synthetic.fields import Field, smooth_noise


@dataclass(frozen=True)
class NucleusKind:
    """Appearance of one kind of nuclei."""

    length_um: float
    width_um: float
    spacing_um: float  # between the centres of neighbours
    haematoxylin: float = 1.0  # mean optical density, before the staining strength of the slide
    size_spread: float = 0.12  # relative standard deviation
    grain: float = 0.16  # variation of the chromatin inside a nucleus
    clumps: float = 0.0  # 0: fine chromatin, 1: coarse clumps
    margination: float = 0.15  # chromatin at the membrane; near 1 the centre is clear
    nucleolus: float = 0.0  # optical density of the nucleolus; 0: no nucleolus
    paired: float = 0.0  # fraction of nuclei that touch a second one
    aligned: float = 0.0  # 0: random orientation, 1: in the direction of the surrounding tissue

    @property
    def max_radius_um(self) -> float:
        """Upper bound of the distance between the centre and the edge."""
        return 0.5 * self.length_um * (1 + 3.2 * self.size_spread) * 1.25


EPITHELIAL = NucleusKind(9.6, 7.6, 11.0, haematoxylin=1.0, aligned=0.4)
STROMAL = NucleusKind(12.0, 3.2, 17.0, haematoxylin=1.1, size_spread=0.26, aligned=0.93)
LYMPHOCYTE = NucleusKind(6.2, 5.8, 7.3, haematoxylin=1.5, size_spread=0.07, grain=0.25, clumps=0.5)
ENDOTHELIAL = NucleusKind(10.0, 2.8, 5.0, haematoxylin=1.15, aligned=1.0)

# Morphologies of targets, at full strength.
MORPHOLOGIES = {
    "coarse": replace(
        EPITHELIAL, length_um=12.6, width_um=10.4, spacing_um=14.7, grain=0.42, clumps=1.0, nucleolus=1.3
    ),
    "vesicular": replace(EPITHELIAL, length_um=11.2, width_um=9.6, spacing_um=13.4, grain=0.1, margination=0.85),
    "spindle": replace(EPITHELIAL, length_um=16.5, width_um=4.5, spacing_um=10.8, aligned=1.0),
    "paired": replace(EPITHELIAL, spacing_um=15.4, paired=1.0),
}
# Morphologies that share only one property with "coarse". They occur in slides of both classes.
LOOKALIKES = {
    "large": replace(EPITHELIAL, length_um=12.6, width_um=10.4, spacing_um=14.7),
    "clumped": replace(EPITHELIAL, grain=0.42, clumps=1.0, nucleolus=0.6),
}


def interpolate_kinds(normal: NucleusKind, planted: NucleusKind, strength: float) -> NucleusKind:
    """Interpolate between two kinds: strength 0 returns the normal one, 1 the planted one."""
    values = {
        name: getattr(normal, name) + strength * (getattr(planted, name) - getattr(normal, name))
        for name in NucleusKind.__dataclass_fields__
    }
    return NucleusKind(**values)


@dataclass(frozen=True)
class Nuclei:
    """Positions, sizes and orientations of nuclei of one kind."""

    name: str  # of the compartment or focus
    kind: NucleusKind
    x_um: Field
    y_um: Field
    length_um: Field
    width_um: Field
    angle: Field

    def __len__(self) -> int:
        return len(self.x_um)

    def __getitem__(self, rows: slice) -> Nuclei:
        arrays = (self.x_um, self.y_um, self.length_um, self.width_um, self.angle)
        return Nuclei(self.name, self.kind, *(array[rows] for array in arrays))


def render_nuclei(rng: np.random.Generator, nuclei: Nuclei, mpp: float) -> tuple[Field, Field]:
    """Render each nucleus as a small square image; return coverage (0 to 1) and optical density, each (n, side, side).

    The central pixel of a square is the pixel that contains the centre of the nucleus, see `_locate_pixels`.
    """
    kind, count = nuclei.kind, len(nuclei)
    half = int(np.ceil(kind.max_radius_um / mpp)) + 1
    _, _, offset_x, offset_y = _locate_pixels(nuclei, mpp)
    steps = np.arange(-half, half + 1, dtype=np.float32) * np.float32(mpp)
    dx = steps[None, None, :] - offset_x[:, None, None]
    dy = steps[None, :, None] - offset_y[:, None, None]
    cosine, sine = np.cos(nuclei.angle)[:, None, None], np.sin(nuclei.angle)[:, None, None]
    u = (cosine * dx + sine * dy) / (nuclei.length_um[:, None, None] / 2)
    v = (cosine * dy - sine * dx) / (nuclei.width_um[:, None, None] / 2)
    radius = np.sqrt(u * u + v * v)
    # an irregular ellipse: second and third harmonics of the angle, computed without arctan2
    safe = radius + np.float32(1e-3)
    cos1, sin1 = u / safe, v / safe
    cos2, sin2 = cos1 * cos1 - sin1 * sin1, 2 * cos1 * sin1
    cos3, sin3 = cos2 * cos1 - sin2 * sin1, sin2 * cos1 + cos2 * sin1
    dents = rng.normal(0, 0.05, (4, count, 1, 1)).astype(np.float32)
    radius /= 1 + dents[0] * cos2 + dents[1] * sin2 + dents[2] * cos3 + dents[3] * sin3
    mean_radius_um = (np.sqrt(nuclei.length_um * nuclei.width_um) / 2)[:, None, None]
    edge_um = np.float32(max(0.9, mpp))
    cover = np.clip((1 - radius) * mean_radius_um / edge_um + 0.5, 0, 1)
    return cover, _render_chromatin(rng, kind, radius, cover, mpp)


def _render_chromatin(rng: np.random.Generator, kind: NucleusKind, radius: Field, cover: Field, mpp: float) -> Field:
    """Return the optical density of nuclei, scaled so that the texture does not change the mean transmitted light."""
    count, side = len(radius), radius.shape[1]
    # sampled before anything that depends on mpp, so that it is the same at every scale
    target_density = (kind.haematoxylin * np.clip(rng.normal(1, 0.17, count), 0.55, 1.6)).astype(np.float32)
    fine, coarse = _make_texture(rng, 0.9 / mpp), _make_texture(rng, 2.8 / mpp)
    rows = rng.integers(0, fine.shape[0] - side, count)[:, None, None] + np.arange(side)[None, :, None]
    columns = rng.integers(0, fine.shape[1] - side, count)[:, None, None] + np.arange(side)[None, None, :]
    texture = fine[rows, columns]
    if kind.clumps > 0:
        texture = (1 - kind.clumps) * texture + kind.clumps * 1.2 * np.tanh(1.6 * coarse[rows, columns])
    density = 1 + np.float32(kind.grain) * texture
    rim = np.exp(-(((radius - 0.9) / 0.16) ** 2))
    centre = np.clip(1.15 - radius, 0, 1)
    density += np.float32(kind.margination) * (np.float32(1.1) * rim - centre)
    if kind.nucleolus > 0:
        # a dot with a random offset from the centre
        shift = rng.uniform(-0.35, 0.35, (2, count, 1, 1)).astype(np.float32)
        span = np.linspace(-1, 1, side, dtype=np.float32) * np.float32(side * mpp / 2)
        dot_x = span[None, None, :] - shift[0] * np.float32(kind.width_um / 2)
        dot_y = span[None, :, None] - shift[1] * np.float32(kind.width_um / 2)
        density += np.float32(kind.nucleolus) * np.exp(-(dot_x**2 + dot_y**2) / np.float32(2 * 0.85**2))
    density = np.maximum(density, np.float32(0.12))
    # A textured nucleus transmits more light than a uniform one of the same mean density (Jensen's inequality).
    # Three Newton steps find the scale that compensates for it.
    inside = cover > 0.5
    weight = inside.sum((1, 2)).astype(np.float32) + np.float32(1e-6)
    scale = target_density[:, None, None].copy()
    for _ in range(3):
        light = np.exp(-density * scale) * inside
        mean = light.sum((1, 2)) / weight
        slope = (light * density).sum((1, 2)) / weight
        scale += ((mean - np.exp(-target_density)) / (slope + 1e-6))[:, None, None]
    return density * scale


def _make_texture(rng: np.random.Generator, wavelength_px: float) -> Field:
    return smooth_noise(rng, (384, 384), max(2.0, 2 * wavelength_px))


def _locate_pixels(nuclei: Nuclei, mpp: float) -> tuple[np.ndarray, np.ndarray, Field, Field]:
    """Return column and row of the pixel that contains each centre, and the offsets (um) from the pixel's centre."""
    column, row = np.floor(nuclei.x_um / mpp).astype(int), np.floor(nuclei.y_um / mpp).astype(int)
    offset_x = (nuclei.x_um - (column + 0.5) * mpp).astype(np.float32)
    offset_y = (nuclei.y_um - (row + 0.5) * mpp).astype(np.float32)
    return column, row, offset_x, offset_y


def composite_nuclei(
    haematoxylin: Field,
    eosin: Field,
    nuclei: Nuclei,
    cover: Field,
    density: Field,
    mpp: float,
    eosin_fraction: float,
) -> None:
    """Draw rendered nuclei into the haematoxylin plane, and scale eosin by `eosin_fraction` where they are."""
    half = cover.shape[1] // 2
    columns, rows, _, _ = _locate_pixels(nuclei, mpp)
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

"""Nuclei: what kinds there are, what makes a planted one different, and how they are drawn.

A planted morphology changes size, shape, chromatin or arrangement, never colour: nuclei that are larger stand further
apart, so that they cover as much as before, and every nucleus lets as much light through as one without texture would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tapfm.synthetic.fields import Field, smooth_noise


@dataclass(frozen=True)
class NucleusKind:
    """How nuclei of one kind look; sizes in microns."""

    length_um: float
    width_um: float
    spacing_um: float  # between neighbours, where they fill their compartment
    haematoxylin: float = 1.0  # how dark, as optical density before the slide's stain
    size_spread: float = 0.12  # relative deviation of the size
    grain: float = 0.16  # how much chromatin varies inside the nucleus
    clumps: float = 0.0  # 0 fine, 1 coarse clumps
    margination: float = 0.15  # how much chromatin lies at the membrane: near 1 the middle is clear
    nucleolus: float = 0.0  # how dark a nucleolus is
    paired: float = 0.0  # share of nuclei that touch a second one
    aligned: float = 0.0  # 0 any direction, 1 along the tissue

    @property
    def reach_um(self) -> float:
        """How far from its middle a nucleus of this kind can reach."""
        return 0.5 * self.length_um * (1 + 3.2 * self.size_spread) * 1.25


EPITHELIAL = NucleusKind(9.6, 7.6, 11.0, haematoxylin=1.0, aligned=0.4)
STROMAL = NucleusKind(12.0, 3.2, 17.0, haematoxylin=1.1, size_spread=0.26, aligned=0.93)
LYMPHOCYTE = NucleusKind(6.2, 5.8, 7.3, haematoxylin=1.5, size_spread=0.07, grain=0.25, clumps=0.5)
ENDOTHELIAL = NucleusKind(10.0, 2.8, 5.0, haematoxylin=1.15, aligned=1.0)

# The morphologies that can be planted, at full strength.
MORPHOLOGIES = {
    "coarse": replace(
        EPITHELIAL, length_um=12.6, width_um=10.4, spacing_um=14.7, grain=0.42, clumps=1.0, nucleolus=1.3
    ),
    "vesicular": replace(EPITHELIAL, length_um=11.2, width_um=9.6, spacing_um=13.4, grain=0.1, margination=0.85),
    "spindle": replace(EPITHELIAL, length_um=16.5, width_um=4.5, spacing_um=10.8, aligned=1.0),
    "paired": replace(EPITHELIAL, spacing_um=15.4, paired=1.0),
}
# What resembles the first of them in one trait alone, and is found in any slide.
LOOKALIKES = {
    "large": replace(EPITHELIAL, length_um=12.6, width_um=10.4, spacing_um=14.7),
    "clumped": replace(EPITHELIAL, grain=0.42, clumps=1.0, nucleolus=0.6),
}


def mix_kinds(plain: NucleusKind, planted: NucleusKind, strength: float) -> NucleusKind:
    """Mix two kinds: strength 0 is the plain one, 1 the planted one."""
    mixed = {
        name: getattr(plain, name) + strength * (getattr(planted, name) - getattr(plain, name))
        for name in NucleusKind.__dataclass_fields__
    }
    return NucleusKind(**mixed)


@dataclass(frozen=True)
class Nuclei:
    """Nuclei of one kind in place: centres, axes and directions."""

    name: str  # of what they belong to: "stroma", "epithelium", a focus, ...
    kind: NucleusKind
    x_um: Field
    y_um: Field
    length_um: Field
    width_um: Field
    angle: Field

    def __len__(self) -> int:
        return len(self.x_um)

    def __getitem__(self, some: slice) -> Nuclei:
        parts = (self.x_um, self.y_um, self.length_um, self.width_um, self.angle)
        return Nuclei(self.name, self.kind, *(part[some] for part in parts))


def render_nuclei(rng: np.random.Generator, nuclei: Nuclei, mpp: float) -> tuple[Field, Field]:
    """Draw each nucleus on a small square of its own: how much it covers (0 to 1) and its optical density.

    All are drawn at once: n x side x side. The middle of the square is the nucleus' middle to a fraction of a pixel,
    see `_locate_pixels`.
    """
    kind, count = nuclei.kind, len(nuclei)
    half = int(np.ceil(kind.reach_um / mpp)) + 1
    _, _, offset_x, offset_y = _locate_pixels(nuclei, mpp)
    steps = np.arange(-half, half + 1, dtype=np.float32) * np.float32(mpp)
    dx = steps[None, None, :] - offset_x[:, None, None]
    dy = steps[None, :, None] - offset_y[:, None, None]
    cosine, sine = np.cos(nuclei.angle)[:, None, None], np.sin(nuclei.angle)[:, None, None]
    u = (cosine * dx + sine * dy) / (nuclei.length_um[:, None, None] / 2)
    v = (cosine * dy - sine * dx) / (nuclei.width_um[:, None, None] / 2)
    radius = np.sqrt(u * u + v * v)
    # an ellipse with dents: second and third harmonics of the angle, cheaper than arctan2
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
    """Give the optical density inside nuclei, with the mean light of a nucleus without texture."""
    count, side = len(radius), radius.shape[1]
    # some are darker than others; drawn first, so that it does not depend on the scale
    wanted = (kind.haematoxylin * np.clip(rng.normal(1, 0.17, count), 0.55, 1.6)).astype(np.float32)
    fine, coarse = _make_texture(rng, 0.9 / mpp), _make_texture(rng, 2.8 / mpp)
    rows = rng.integers(0, fine.shape[0] - side, count)[:, None, None] + np.arange(side)[None, :, None]
    columns = rng.integers(0, fine.shape[1] - side, count)[:, None, None] + np.arange(side)[None, None, :]
    speckle = fine[rows, columns]
    if kind.clumps > 0:
        speckle = (1 - kind.clumps) * speckle + kind.clumps * 1.2 * np.tanh(1.6 * coarse[rows, columns])
    density = 1 + np.float32(kind.grain) * speckle
    rim = np.exp(-(((radius - 0.9) / 0.16) ** 2))
    middle = np.clip(1.15 - radius, 0, 1)
    density += np.float32(kind.margination) * (np.float32(1.1) * rim - middle)
    if kind.nucleolus > 0:
        # a dot off the middle
        shift = rng.uniform(-0.35, 0.35, (2, count, 1, 1)).astype(np.float32)
        span = np.linspace(-1, 1, side, dtype=np.float32) * np.float32(side * mpp / 2)
        dot_x = span[None, None, :] - shift[0] * np.float32(kind.width_um / 2)
        dot_y = span[None, :, None] - shift[1] * np.float32(kind.width_um / 2)
        density += np.float32(kind.nucleolus) * np.exp(-(dot_x**2 + dot_y**2) / np.float32(2 * 0.85**2))
    density = np.maximum(density, np.float32(0.12))
    # Texture lets more light through than its mean does (Jensen); three steps of Newton give it back.
    inside = cover > 0.5
    weight = inside.sum((1, 2)).astype(np.float32) + np.float32(1e-6)
    scale = wanted[:, None, None].copy()
    for _ in range(3):
        light = np.exp(-density * scale) * inside
        mean = light.sum((1, 2)) / weight
        slope = (light * density).sum((1, 2)) / weight
        scale += ((mean - np.exp(-wanted)) / (slope + 1e-6))[:, None, None]
    return density * scale


def _make_texture(rng: np.random.Generator, wavelength_px: float) -> Field:
    """Make a sheet of noise to cut chromatin from."""
    return smooth_noise(rng, (384, 384), max(2.0, 2 * wavelength_px))


def _locate_pixels(nuclei: Nuclei, mpp: float) -> tuple[np.ndarray, np.ndarray, Field, Field]:
    """Give the pixel that each nucleus' middle is in, and how far (um) from that pixel's middle it lies."""
    column, row = np.floor(nuclei.x_um / mpp).astype(int), np.floor(nuclei.y_um / mpp).astype(int)
    offset_x = (nuclei.x_um - (column + 0.5) * mpp).astype(np.float32)
    offset_y = (nuclei.y_um - (row + 0.5) * mpp).astype(np.float32)
    return column, row, offset_x, offset_y


def composite_nuclei(
    plane: Field, other: Field, nuclei: Nuclei, cover: Field, density: Field, mpp: float, other_share: float
) -> None:
    """Lay drawn nuclei onto the haematoxylin plane, and dim the eosin plane beneath to `other_share` of it."""
    half = cover.shape[1] // 2
    columns, rows, _, _ = _locate_pixels(nuclei, mpp)
    height, width = plane.shape
    for column, row, alpha, value in zip(columns, rows, cover, density, strict=True):
        top, left = max(row - half, 0), max(column - half, 0)
        bottom, right = min(row + half + 1, height), min(column + half + 1, width)
        if top >= bottom or left >= right:
            continue
        part = np.s_[top - row + half : bottom - row + half, left - column + half : right - column + half]
        below = plane[top:bottom, left:right]
        below += alpha[part] * (value[part] - below)
        beneath = other[top:bottom, left:right]
        beneath *= 1 - (1 - np.float32(other_share)) * alpha[part]

"""Generate a section of tissue in microns: masks of its compartments and foci, and the positions of its nuclei.

A section does not depend on a scanner or staining; `stain_rendering.py` renders it at any scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

from tapfm.runtime.seeding import make_rng
from tapfm.slides.tissue import Mask, find_small_components
from tapfm.synthetic.fields import (
    Float32Array,
    Shape,
    distance_inside,
    fibre_coordinates,
    sample_rough_noise,
    sample_smooth_noise,
)
from tapfm.synthetic.nuclei import ENDOTHELIAL, EPITHELIAL, LYMPHOCYTE, STROMAL, Nuclei, NucleusKind

Outline: TypeAlias = Literal["resection", "chips", "cores"]  # one large piece, several small pieces, needle cores

MAP_MPP = 1.0  # um per pixel of the masks and maps of a section
_MAX_FOCI_FRACTION_OF_EPITHELIUM = 0.9  # of all foci together
_MIN_LUMEN_UM2, _MAX_LUMEN_UM2 = 180, 30_000
_MARGIN_FRACTION = 0.06  # mean width of the strip without tissue along the edges, as a fraction of the shorter side


class Compartment(IntEnum):
    """Type of tissue at a position of the section. The numbers are pixel values of the truth image."""

    GLASS = 0
    STROMA = 1
    EPITHELIUM = 2
    LUMEN = 3
    FAT = 4
    LYMPHOID = 5
    VESSEL = 6


@dataclass(frozen=True)
class Focus:
    """Part of the epithelium with altered nuclei: the signal of a target, or a lookalike of such a signal."""

    name: str  # of the target or lookalike
    kind: NucleusKind
    fraction_of_epithelium: float  # before the limit of _MAX_FOCI_FRACTION_OF_EPITHELIUM


@dataclass(frozen=True)
class SectionSpec:
    """Settings of a section. Fractions are fractions of the tissue area unless a comment says otherwise."""

    width_um: float
    height_um: float
    tissue_fraction: float  # of the area of the slide
    outline: Outline = "resection"
    epithelium_fraction: float = 0.42
    lumen_probability: float = 0.5  # probability that the inside of a nest of epithelium is a lumen
    fat_fraction: float = 0.06
    lymphoid_fraction: float = 0.04
    inflamed_stroma_fraction: float = 0.15  # fraction of the stroma with clusters of lymphocytes
    nuclear_scale: float = 1.0  # factor of the size and spacing of epithelial nuclei, including those of foci
    extra_nuclear_spacing_scale: float = 1.0  # additional factor of the spacing of these nuclei
    foci: tuple[Focus, ...] = ()


@dataclass(frozen=True)
class TissueSection:
    """A generated section. Masks and maps have MAP_MPP microns per pixel."""

    spec: SectionSpec
    compartments: npt.NDArray[np.uint8]  # values of Compartment
    foci_map: npt.NDArray[np.uint8]  # 0: no focus; otherwise 1 + the index in `spec.foci`
    along_fibres_px: Float32Array  # coordinate of each pixel along the fibres of the stroma
    across_fibres_px: Float32Array  # coordinate of each pixel across the fibres of the stroma
    depth_in_vessel_um: Float32Array  # distance of each pixel to the edge of its vessel; 0 outside vessels
    fat_walls: Mask  # walls of fat cells
    nuclei: tuple[Nuclei, ...]  # one entry per group, such as a compartment or a focus

    @property
    def tissue(self) -> Mask:
        """Mask of all tissue, including lumens and fat."""
        return np.asarray(self.compartments != Compartment.GLASS)


def generate_section(spec: SectionSpec, *rng_key: int | str) -> TissueSection:
    """Generate a section; the same `spec` and `rng_key` give the same section."""
    shape_hw = round(spec.height_um / MAP_MPP), round(spec.width_um / MAP_MPP)
    tissue = _generate_tissue_mask(make_rng(*rng_key, "outline"), shape_hw, spec)
    compartments = np.where(tissue, np.uint8(Compartment.STROMA), np.uint8(Compartment.GLASS))
    area_px = int(tissue.sum())

    rng = make_rng(*rng_key, "compartments")
    edge_distance_px = distance_inside(tissue)
    fat = _select_highest(
        sample_rough_noise(rng, shape_hw, 420, 3), tissue & (edge_distance_px > 30), spec.fat_fraction * area_px
    )
    nests = 0.9 * sample_smooth_noise(rng, shape_hw, 420) + sample_rough_noise(rng, shape_hw, 125, 3, 0.42)
    epithelium = _remove_small_components(
        _select_highest(nests, tissue & ~fat, spec.epithelium_fraction * area_px), 900
    )
    # a lumen keeps a distance from the stroma, so that the epithelium around it has a nearly even thickness
    depth_px = distance_inside(epithelium)
    thickness_px = 22 + 4 * sample_smooth_noise(rng, shape_hw, 200) + 3.5 * sample_rough_noise(rng, shape_hw, 40, 2)
    lumen = _select_lumens(rng, depth_px > thickness_px, spec.lumen_probability)
    stroma = tissue & ~fat & ~epithelium
    lymphoid = _select_highest(
        sample_rough_noise(rng, shape_hw, 230, 2), stroma & (edge_distance_px > 15), spec.lymphoid_fraction * area_px
    )
    vessels = _draw_vessels(make_rng(*rng_key, "vessels"), stroma & ~lymphoid & (edge_distance_px > 40), area_px)
    for mask, compartment in (
        (fat, Compartment.FAT),
        (epithelium, Compartment.EPITHELIUM),
        (lumen, Compartment.LUMEN),
        (lymphoid, Compartment.LYMPHOID),
        (vessels, Compartment.VESSEL),
    ):
        compartments[mask] = compartment

    along_fibres_px, across_fibres_px = fibre_coordinates(
        make_rng(*rng_key, "fibres"), shape_hw, bend_px=38, wavelength_px=260
    )
    foci_map = _place_foci(make_rng(*rng_key, "foci"), compartments == Compartment.EPITHELIUM, spec.foci)
    nuclei = _place_nuclei(compartments, foci_map, across_fibres_px, spec, *rng_key, "nuclei")
    return TissueSection(
        spec,
        compartments,
        foci_map,
        along_fibres_px,
        across_fibres_px,
        distance_inside(vessels),
        _draw_fat_walls(make_rng(*rng_key, "fat"), fat),
        nuclei,
    )


def _select_highest(field: Float32Array, within: Mask, area_px: float) -> Mask:
    """Return a mask of the `area_px` pixels of `within` that have the highest values in `field`.

    If `within` has fewer pixels, return a mask of all its pixels.
    """
    values = field[within]
    count = min(int(area_px), len(values))
    if count <= 0:
        return np.zeros_like(within)
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    return np.asarray(within & (field >= threshold))


def _select_lumens(rng: np.random.Generator, candidates: Mask, probability: float) -> Mask:
    """Return a mask of the lumens: connected regions of `candidates`, each selected with `probability`.

    Very small and very large regions are not selected.
    """
    _, labels, statistics, _ = cv2.connectedComponentsWithStats(candidates.astype(np.uint8), connectivity=4)
    area = statistics[:, cv2.CC_STAT_AREA]
    is_lumen = (area >= _MIN_LUMEN_UM2) & (area <= _MAX_LUMEN_UM2) & (rng.random(len(area)) < probability)
    is_lumen[0] = False  # pixels outside the candidates
    return np.asarray(is_lumen[labels])


def _remove_small_components(mask: Mask, min_px: int) -> Mask:
    return mask & ~find_small_components(mask, min_px, connectivity=4)


def _generate_tissue_mask(rng: np.random.Generator, shape_hw: Shape, spec: SectionSpec) -> Mask:
    """Return a tissue mask with irregular edges. `spec.outline` determines the number and shape of its pieces."""
    height, width = shape_hw
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    # Each piece is an ellipse: centre x and y in pixels, half axes as fractions of width and height, angle in radians.
    if spec.outline == "resection":
        pieces = [(width * rng.uniform(0.45, 0.55), height * rng.uniform(0.45, 0.55), 0.46, 0.46, 0.0)]
    elif spec.outline == "chips":
        count = int(rng.integers(4, 7))
        angles = rng.uniform(0, 2 * np.pi) + np.arange(count) * 2 * np.pi / count
        pieces = [
            (
                width * (0.5 + 0.29 * np.cos(angle) * rng.uniform(0.8, 1.15)),
                height * (0.5 + 0.29 * np.sin(angle) * rng.uniform(0.8, 1.15)),
                rng.uniform(0.14, 0.24),
                rng.uniform(0.12, 0.2),
                rng.uniform(0, np.pi),
            )
            for angle in angles
        ]
    else:  # "cores"
        count = int(rng.integers(2, 4))
        tilt = rng.uniform(-0.25, 0.25)
        pieces = [
            (width / 2, height * (index + 0.5) / count, 0.5, 0.34 / count, tilt + rng.uniform(-0.06, 0.06))
            for index in range(count)
        ]
    field = np.full(shape_hw, -9.0, np.float32)
    for centre_x, centre_y, half_long, half_short, angle in pieces:
        dx, dy = x - np.float32(centre_x), y - np.float32(centre_y)
        u = (np.cos(angle) * dx + np.sin(angle) * dy) / np.float32(half_long * width)
        v = (np.cos(angle) * dy - np.sin(angle) * dx) / np.float32(half_short * height)
        np.maximum(field, 1 - np.sqrt(u * u + v * v), out=field)
    field += 0.16 * sample_rough_noise(rng, shape_hw, 520, 3) + 0.016 * sample_rough_noise(rng, shape_hw, 55, 3, 0.6)
    edge_um = MAP_MPP * np.minimum(np.minimum(x, width - 1 - x), np.minimum(y, height - 1 - y))
    uneven = np.clip(1 + 0.4 * sample_smooth_noise(rng, shape_hw, 160), 0.4, None)
    allowed = edge_um > _MARGIN_FRACTION * min(spec.width_um, spec.height_um) * uneven
    tissue = _remove_small_components(_select_highest(field, allowed, spec.tissue_fraction * height * width), 6000)
    return ~_remove_small_components(~tissue, 400)  # fills small holes caused by the noise


def _draw_vessels(rng: np.random.Generator, stroma: Mask, tissue_area_px: int) -> Mask:
    """Return a mask of small vessels at random positions in the stroma. Their number depends on the tissue area."""
    canvas = np.zeros(stroma.shape, np.uint8)
    rows, columns = np.nonzero(stroma)
    for _ in range(round(tissue_area_px / 45_000) if len(rows) else 0):
        chosen = int(rng.integers(len(rows)))
        half_long_px = rng.uniform(8, 26)
        axes = (half_long_px, half_long_px * rng.uniform(0.35, 0.9))
        cv2.ellipse(
            canvas,
            ((float(columns[chosen]), float(rows[chosen])), (2 * axes[0], 2 * axes[1]), rng.uniform(0, 180)),
            1,
            -1,
        )
    return np.asarray(canvas.astype(bool) & stroma)


def _place_foci(rng: np.random.Generator, epithelium: Mask, foci: Sequence[Focus]) -> npt.NDArray[np.uint8]:
    """Place each focus in one or two regions of the epithelium; return `TissueSection.foci_map`.

    All foci are made smaller in proportion if their fractions add up to more than _MAX_FOCI_FRACTION_OF_EPITHELIUM.
    """
    foci_map = np.zeros(epithelium.shape, np.uint8)
    total_fraction = sum(focus.fraction_of_epithelium for focus in foci)
    area = epithelium.sum() * min(1, _MAX_FOCI_FRACTION_OF_EPITHELIUM / max(total_fraction, 1e-9))
    y, x = np.mgrid[0 : epithelium.shape[0], 0 : epithelium.shape[1]].astype(np.float32)
    for index, focus in enumerate(foci):
        free = epithelium & (foci_map == 0)
        rows, columns = np.nonzero(free)
        nearness = np.full(epithelium.shape, -np.inf, np.float32)
        for _ in range(int(rng.integers(1, 3))):
            chosen = int(rng.integers(len(rows)))
            np.maximum(nearness, -np.hypot(x - columns[chosen], y - rows[chosen]), out=nearness)
        nearness += 35 * sample_smooth_noise(rng, epithelium.shape, 150)
        foci_map[_select_highest(nearness, free, max(focus.fraction_of_epithelium * area, 1))] = index + 1
    return foci_map


def _sample_points(rng: np.random.Generator, shape_hw: Shape, spacing_um: float) -> tuple[Float32Array, Float32Array]:
    """Return the coordinates x and y, in microns, of points on a jittered hexagonal grid over the section."""
    height_um, width_um = shape_hw[0] * MAP_MPP, shape_hw[1] * MAP_MPP
    row_um = spacing_um * np.sqrt(3) / 2
    rows, columns = np.mgrid[0 : int(height_um / row_um), 0 : int(width_um / spacing_um)].astype(np.float32)
    x = (columns + 0.5 * (rows % 2) + 0.25) * spacing_um + rng.normal(0, 0.17 * spacing_um, rows.shape)
    y = (rows + 0.5) * row_um + rng.normal(0, 0.17 * spacing_um, rows.shape)
    x, y = x.astype(np.float32), y.astype(np.float32)  # before the comparison: rounding may move a point to the edge
    inside = (x >= 0) & (y >= 0) & (x < width_um) & (y < height_um)
    return x[inside], y[inside]


def _draw_fat_walls(rng: np.random.Generator, fat: Mask, spacing_um: float = 62.0) -> Mask:
    """Return a mask of the walls of fat cells. Walls are thicker where three cells meet, so that cells are round."""
    x, y = _sample_points(rng, fat.shape, spacing_um)
    from_border = distance_inside(~draw_voronoi_borders(x, y, fat.shape))
    return fat & (cv2.GaussianBlur(from_border, (0, 0), 4.0) < 3.32)


def draw_voronoi_borders(x_um: Float32Array, y_um: Float32Array, shape_hw: Shape) -> Mask:
    """Return a mask of the borders between the Voronoi cells of the points (x_um, y_um).

    The mask has `shape_hw` pixels, and MAP_MPP microns per pixel.
    """
    empty = np.ones(shape_hw, np.uint8)
    empty[(y_um / MAP_MPP).astype(int), (x_um / MAP_MPP).astype(int)] = 0
    if empty.all():
        return np.zeros(shape_hw, bool)
    _, nearest = cv2.distanceTransformWithLabels(empty, cv2.DIST_L2, 5, labelType=cv2.DIST_LABEL_PIXEL)
    borders = np.zeros(shape_hw, bool)
    borders[:, 1:] |= nearest[:, 1:] != nearest[:, :-1]
    borders[1:] |= nearest[1:] != nearest[:-1]
    return borders


def _place_nuclei(
    compartments: npt.NDArray[np.uint8],
    foci_map: npt.NDArray[np.uint8],
    across_fibres_px: Float32Array,
    spec: SectionSpec,
    *rng_key: int | str,
) -> tuple[Nuclei, ...]:
    """Place the nuclei of each compartment and focus.

    Each group of nuclei has a separate random stream, so that a focus does not change the nuclei outside the focus. The
    names of the groups must not change, because they are part of the keys of these streams.
    """
    off_edge = (
        distance_inside(compartments != Compartment.GLASS) > 4
    )  # px; keeps nuclei away from the edge of the tissue
    stroma, epithelium = off_edge & (compartments == Compartment.STROMA), compartments == Compartment.EPITHELIUM
    lymphoid, vessel = compartments == Compartment.LYMPHOID, compartments == Compartment.VESSEL
    # `depth`, `from_lumen` and `from_wall` are distances in pixels; the directions are angles in radians
    depth = distance_inside(epithelium | (compartments == Compartment.LUMEN))
    from_lumen = distance_inside(compartments != Compartment.LUMEN)
    inward_direction = _gradient_angle(cv2.GaussianBlur(depth, (0, 0), 3.0))
    fibre_direction = _gradient_angle(across_fibres_px) + np.float32(np.pi / 2)
    from_wall = distance_inside(vessel)
    wall_direction = _gradient_angle(from_wall) + np.float32(np.pi / 2)
    # glandular cells have their nucleus on the side of the stroma; there is only cytoplasm near the lumen
    epithelial = off_edge & epithelium & (depth > 3.5) & (from_lumen > 8)
    lymphocyte_density = sample_rough_noise(make_rng(*rng_key, "swarms"), stroma.shape, 120, 2)
    lymphocyte_clusters = _select_highest(lymphocyte_density, stroma, spec.inflamed_stroma_fraction * stroma.sum())

    def place(group: str, kind: NucleusKind, mask: Mask, direction: Float32Array, keep_fraction: float) -> Nuclei:
        return _fill_with_nuclei(make_rng(*rng_key, group), group, kind, mask, direction, keep_fraction)

    kinds = [("epithelium", EPITHELIAL), *((each.name, each.kind) for each in spec.foci)]
    nuclei = []
    for number, (group, kind) in enumerate(kinds):
        scaled = _scale_nucleus_kind(kind, spec.nuclear_scale, spec.extra_nuclear_spacing_scale)
        # spindle-shaped nuclei lie along the fibres of the stroma, other nuclei point to the middle of their nest
        direction = fibre_direction if kind.length_um > 2 * kind.width_um else inward_direction
        nuclei.append(place(group, scaled, epithelial & (foci_map == number), direction, 0.94))
    nuclei += [
        place("stroma", STROMAL, stroma, fibre_direction, 0.7),
        place("lymphoid", LYMPHOCYTE, lymphoid & off_edge, fibre_direction, 0.86),
        place("single lymphocytes", LYMPHOCYTE, stroma, fibre_direction, 0.05),
        place("lymphocytes in swarms", LYMPHOCYTE, lymphocyte_clusters, fibre_direction, 0.42),
        place("vessel", ENDOTHELIAL, vessel & (from_wall < 2.5), wall_direction, 1.0),
    ]
    return tuple(each for each in nuclei if len(each))


def _scale_nucleus_kind(kind: NucleusKind, scale: float, extra_spacing_scale: float) -> NucleusKind:
    """Scale the size and spacing of nuclei by `scale`, and their spacing additionally by `extra_spacing_scale`."""
    return replace(
        kind,
        length_um=kind.length_um * scale,
        width_um=kind.width_um * scale,
        spacing_um=kind.spacing_um * scale * extra_spacing_scale,
    )


def _gradient_angle(field: Float32Array) -> Float32Array:
    """Return the direction of the gradient of a field, in radians; 0: right, pi / 2: down."""
    smooth = cv2.GaussianBlur(field, (0, 0), 2.0)
    return np.arctan2(cv2.Sobel(smooth, cv2.CV_32F, 0, 1), cv2.Sobel(smooth, cv2.CV_32F, 1, 0)).astype(np.float32)


def _fill_with_nuclei(
    rng: np.random.Generator,
    group: str,
    kind: NucleusKind,
    mask: Mask,
    direction: Float32Array,
    keep_fraction: float = 1.0,
) -> Nuclei:
    """Fill a mask with nuclei of one kind.

    group: name of this group of nuclei, see `Nuclei`.
    direction: local direction of the tissue at each pixel of the section, in radians.
    keep_fraction: fraction of the positions that get a nucleus.
    """
    x, y = _sample_points(rng, mask.shape, kind.spacing_um)
    count, spread = len(x), kind.relative_size_sd
    # sampled for all positions before the mask is applied, so that the mask does not change the nuclei that remain
    chance, rotation = rng.random(count), rng.uniform(-np.pi / 2, np.pi / 2, count)
    size = np.clip(rng.normal(1, spread, count), 1 - 3 * spread, 1 + 3 * spread)
    ratio = np.clip(rng.normal(1, 0.08, count), 0.8, 1.2)
    paired = rng.random(count) < kind.paired_fraction
    rows, columns = (y / MAP_MPP).astype(int), (x / MAP_MPP).astype(int)
    angle = direction[rows, columns] + (1 - kind.alignment) * rotation
    kept = mask[rows, columns] & (chance < keep_fraction)
    x, y, angle, paired = x[kept], y[kept], angle[kept], paired[kept]
    length, width = (kind.length_um * size * ratio)[kept], (kind.width_um * size / ratio)[kept]
    if paired.any():  # add a second nucleus next to the first
        side = angle + np.pi / 2
        shift_x, shift_y = np.cos(side) * width * 0.49, np.sin(side) * width * 0.49
        x = np.concatenate([x - paired * shift_x, (x + shift_x)[paired]])
        y = np.concatenate([y - paired * shift_y, (y + shift_y)[paired]])
        length, width, angle = (np.concatenate([each, each[paired]]) for each in (length, width, angle))
    x, y, length, width, angle = (each.astype(np.float32) for each in (x, y, length, width, angle))
    return Nuclei(group, kind, x, y, length, width, angle)

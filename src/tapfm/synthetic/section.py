"""The plan of a section of tissue, in microns: where each compartment lies and where each nucleus stands.

Nothing here knows pixels of a scanner or colours: `painting.py` draws the plan at any scale, and what is planted, and
where, is known exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

from tapfm.seeding import rng_for
from tapfm.synthetic.fields import Field, Shape, distance_inside, rough_noise, smooth_noise, wavy_coordinates
from tapfm.synthetic.nuclei import ENDOTHELIAL, EPITHELIAL, LYMPHOCYTE, STROMAL, Nuclei, NucleusKind

Mask: TypeAlias = npt.NDArray[np.bool_]
Outline: TypeAlias = Literal["resection", "chips", "cores"]

MAP_MPP = 1.0  # um per pixel of the plan's maps
MARGIN = 0.06  # part of the shorter side that stays glass along the edges


class Compartment(IntEnum):
    """What a place of the section is."""

    GLASS = 0
    STROMA = 1
    EPITHELIUM = 2
    LUMEN = 3
    FAT = 4
    LYMPHOID = 5
    VESSEL = 6


@dataclass(frozen=True)
class Focus:
    """Epithelium whose nuclei are of another kind, over a share of the tissue."""

    name: str
    kind: NucleusKind
    share: float


@dataclass(frozen=True)
class SectionSpec:
    """What a section is to be like; shares are of the tissue."""

    width_um: float
    height_um: float
    tissue_share: float  # of the whole area
    outline: Outline = "resection"
    epithelium_share: float = 0.42
    gland_share: float = 0.5  # of the epithelium that is thick enough for a lumen
    fat_share: float = 0.06
    lymphoid_share: float = 0.04
    inflammation: float = 0.15  # lymphocytes scattered through the stroma
    nuclear_scale: float = 1.0  # the slide's own size of epithelial nuclei
    foci: tuple[Focus, ...] = ()


@dataclass(frozen=True)
class Section:
    """A planned section; maps have MAP_MPP microns per pixel."""

    spec: SectionSpec
    compartments: npt.NDArray[np.uint8]
    focus: npt.NDArray[np.uint8]  # 0, or 1 + the index of the focus in the spec
    along: Field  # coordinates along and across the fibres of the stroma
    across: Field
    vessel_edge_um: Field  # distance from a vessel's wall, inside it
    fat_walls: Mask
    nuclei: tuple[Nuclei, ...]

    @property
    def tissue(self) -> Mask:
        """All that is not glass, with the lumens and the fat inside it."""
        return np.asarray(self.compartments != Compartment.GLASS)


def plan_section(spec: SectionSpec, *address: int | str) -> Section:
    """Lay out a section; the same address gives the same one."""
    shape_hw = round(spec.height_um / MAP_MPP), round(spec.width_um / MAP_MPP)
    tissue = outline(rng_for(*address, "outline"), shape_hw, spec)
    compartments = np.where(tissue, np.uint8(Compartment.STROMA), np.uint8(Compartment.GLASS))
    area = int(tissue.sum())

    rng = rng_for(*address, "compartments")
    inner = distance_inside(tissue)
    fat = highest(rough_noise(rng, shape_hw, 420, 3), tissue & (inner > 30), spec.fat_share * area)
    nests = 0.9 * smooth_noise(rng, shape_hw, 420) + rough_noise(rng, shape_hw, 125, 3, 0.42)
    epithelium = highest(nests, tissue & ~fat & (inner > 6), spec.epithelium_share * area)
    epithelium = without_crumbs(epithelium, 900)
    # a lumen keeps its distance from the stroma: what remains is an epithelium of even thickness
    depth = distance_inside(epithelium)
    thickness = 22 + 4 * smooth_noise(rng, shape_hw, 200)
    glandular = highest(smooth_noise(rng, shape_hw, 500), epithelium, spec.gland_share * int(epithelium.sum()))
    lumen = without_crumbs(glandular & (depth > thickness + 3.5 * rough_noise(rng, shape_hw, 40, 2)), 180)
    stroma = tissue & ~fat & ~epithelium
    lymphoid = highest(rough_noise(rng, shape_hw, 230, 2), stroma & (inner > 15), spec.lymphoid_share * area)
    vessels = draw_vessels(rng_for(*address, "vessels"), stroma & ~lymphoid & (inner > 40), area)
    for mask, compartment in (
        (fat, Compartment.FAT),
        (epithelium, Compartment.EPITHELIUM),
        (lumen, Compartment.LUMEN),
        (lymphoid, Compartment.LYMPHOID),
        (vessels, Compartment.VESSEL),
    ):
        compartments[mask] = compartment

    along, across = wavy_coordinates(rng_for(*address, "fibres"), shape_hw, bend_px=38, wavelength_px=260)
    focus = choose_foci(rng_for(*address, "foci"), compartments == Compartment.EPITHELIUM, spec.foci, area)
    nuclei = place_nuclei(rng_for(*address, "nuclei"), compartments, focus, across, spec)
    return Section(
        spec,
        compartments,
        focus,
        along,
        across,
        distance_inside(vessels),
        cell_borders(rng_for(*address, "fat"), fat, 58.0),
        nuclei,
    )


def highest(field: Field, within: Mask, area: float) -> Mask:
    """Take the highest places of a field, `area` pixels of them, within a mask."""
    values = field[within]
    wanted = min(int(area), len(values))
    if wanted <= 0:
        return np.zeros_like(within)
    threshold = np.partition(values, len(values) - wanted)[len(values) - wanted]
    return np.asarray(within & (field >= threshold))


def without_crumbs(mask: Mask, smallest_px: int) -> Mask:
    """Drop pieces smaller than that."""
    _, labels, statistics, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=4)
    keep = statistics[:, cv2.CC_STAT_AREA] >= smallest_px
    keep[0] = False
    return np.asarray(keep[labels])


def outline(rng: np.random.Generator, shape_hw: Shape, spec: SectionSpec) -> Mask:
    """Draw the outline of the tissue: one large piece, chips, or needle cores, ragged at the edge."""
    height, width = shape_hw
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
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
    else:
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
    field += 0.16 * rough_noise(rng, shape_hw, 520, 3) + 0.016 * rough_noise(rng, shape_hw, 55, 3, 0.6)
    edge_um = MAP_MPP * np.minimum(np.minimum(x, width - 1 - x), np.minimum(y, height - 1 - y))
    uneven = np.clip(1 + 0.25 * smooth_noise(rng, shape_hw, 160), 0.4, None)
    allowed = edge_um > MARGIN * min(spec.width_um, spec.height_um) * uneven
    tissue = without_crumbs(highest(field, allowed, spec.tissue_share * height * width), 6000)
    return ~without_crumbs(~tissue, 400)  # pinholes of the noise are no lumens


def draw_vessels(rng: np.random.Generator, stroma: Mask, area: int) -> Mask:
    """Scatter small vessels in the stroma, cut along or across."""
    drawn = np.zeros(stroma.shape, np.uint8)
    rows, columns = np.nonzero(stroma)
    for _ in range(round(area / 45_000) if len(rows) else 0):
        at = int(rng.integers(len(rows)))
        long = rng.uniform(8, 26)
        axes = (long, long * rng.uniform(0.35, 0.9))
        cv2.ellipse(
            drawn, ((float(columns[at]), float(rows[at])), (2 * axes[0], 2 * axes[1]), rng.uniform(0, 180)), 1, -1
        )
    return np.asarray(drawn.astype(bool) & stroma)


def choose_foci(
    rng: np.random.Generator, epithelium: Mask, foci: Sequence[Focus], tissue_area: int
) -> npt.NDArray[np.uint8]:
    """Give each focus one or two places in the epithelium, as much of it as its share of the tissue has."""
    chosen = np.zeros(epithelium.shape, np.uint8)
    share_of_epithelium = epithelium.sum() / max(tissue_area, 1)
    y, x = np.mgrid[0 : epithelium.shape[0], 0 : epithelium.shape[1]].astype(np.float32)
    for index, focus in enumerate(foci):
        free = epithelium & (chosen == 0)
        rows, columns = np.nonzero(free)
        if not len(rows):
            break
        nearness = np.full(epithelium.shape, -np.inf, np.float32)
        for _ in range(int(rng.integers(1, 3))):
            at = int(rng.integers(len(rows)))
            np.maximum(nearness, -np.hypot(x - columns[at], y - rows[at]), out=nearness)
        nearness += 35 * smooth_noise(rng, epithelium.shape, 150)
        chosen[highest(nearness, free, focus.share * share_of_epithelium * tissue_area)] = index + 1
    return chosen


def hexagonal(rng: np.random.Generator, shape_hw: Shape, spacing_um: float) -> tuple[Field, Field]:
    """Scatter points over the section at about an even distance from each other, in microns."""
    height_um, width_um = shape_hw[0] * MAP_MPP, shape_hw[1] * MAP_MPP
    row_um = spacing_um * np.sqrt(3) / 2
    rows, columns = np.mgrid[0 : int(height_um / row_um), 0 : int(width_um / spacing_um)].astype(np.float32)
    x = (columns + 0.5 * (rows % 2) + 0.25) * spacing_um + rng.normal(0, 0.17 * spacing_um, rows.shape)
    y = (rows + 0.5) * row_um + rng.normal(0, 0.17 * spacing_um, rows.shape)
    x, y = x.astype(np.float32), y.astype(np.float32)  # before they are compared: rounding may reach the edge
    inside = (x >= 0) & (y >= 0) & (x < width_um) & (y < height_um)
    return x[inside], y[inside]


def cell_borders(rng: np.random.Generator, within: Mask, spacing_um: float) -> Mask:
    """Draw the borders between cells of about that distance: the lines that are nearest to two of them."""
    x, y = hexagonal(rng, within.shape, spacing_um)
    return borders_between(x, y, within.shape) & within


def borders_between(x_um: Field, y_um: Field, shape_hw: Shape) -> Mask:
    """Draw the lines that are as near to one point as to another."""
    empty = np.ones(shape_hw, np.uint8)
    empty[(y_um / MAP_MPP).astype(int), (x_um / MAP_MPP).astype(int)] = 0
    if empty.all():
        return np.zeros(shape_hw, bool)
    _, nearest = cv2.distanceTransformWithLabels(empty, cv2.DIST_L2, 5, labelType=cv2.DIST_LABEL_PIXEL)
    borders = np.zeros(shape_hw, bool)
    borders[:, 1:] |= nearest[:, 1:] != nearest[:, :-1]
    borders[1:] |= nearest[1:] != nearest[:-1]
    return borders


def place_nuclei(
    rng: np.random.Generator,
    compartments: npt.NDArray[np.uint8],
    focus: npt.NDArray[np.uint8],
    across: Field,
    spec: SectionSpec,
) -> tuple[Nuclei, ...]:
    """Put nuclei of each kind into their compartments."""
    stroma, epithelium = compartments == Compartment.STROMA, compartments == Compartment.EPITHELIUM
    with_lumen = epithelium | (compartments == Compartment.LUMEN)
    depth, from_lumen = distance_inside(with_lumen), distance_inside(compartments != Compartment.LUMEN)
    towards_middle = direction_of(cv2.GaussianBlur(depth, (0, 0), 3.0))
    fibres = direction_of(across) + np.float32(np.pi / 2)

    # cells of a gland stand on the stroma with their nucleus low: what is near the lumen is cytoplasm
    room = epithelium & (depth > 3.5) & (from_lumen > 8)
    kinds = [(EPITHELIAL, 0), *((each.kind, index + 1) for index, each in enumerate(spec.foci))]
    placed = []
    for kind, number in kinds:
        scaled = scale_kind(kind, spec.nuclear_scale)
        direction = fibres if kind.length_um > 2 * kind.width_um else towards_middle
        placed.append(fill(rng, scaled, room & (focus == number), direction, keep=0.94))
    placed.append(fill(rng, STROMAL, stroma & (depth == 0), fibres, keep=0.7))
    placed.append(fill(rng, LYMPHOCYTE, compartments == Compartment.LYMPHOID, fibres, keep=0.86))
    placed.append(fill(rng, LYMPHOCYTE, stroma, fibres, keep=0.05))
    # lymphocytes come in swarms
    swarms = highest(rough_noise(rng, stroma.shape, 120, 2), stroma, spec.inflammation * stroma.sum())
    placed.append(fill(rng, LYMPHOCYTE, swarms, fibres, keep=0.42))
    vessel = compartments == Compartment.VESSEL
    lining = vessel & (distance_inside(vessel) < 2.5)
    placed.append(
        fill(rng, ENDOTHELIAL, lining, direction_of(distance_inside(vessel)) + np.float32(np.pi / 2), spacing_um=5.0)
    )
    return tuple(nuclei for nuclei in placed if len(nuclei))


def scale_kind(kind: NucleusKind, scale: float) -> NucleusKind:
    """Make nuclei larger or smaller, with what they cover left as it is."""
    return replace(
        kind, length_um=kind.length_um * scale, width_um=kind.width_um * scale, spacing_um=kind.spacing_um * scale
    )


def direction_of(field: Field) -> Field:
    """Give the angle in which a field rises."""
    smooth = cv2.GaussianBlur(field, (0, 0), 2.0)
    return np.arctan2(cv2.Sobel(smooth, cv2.CV_32F, 0, 1), cv2.Sobel(smooth, cv2.CV_32F, 1, 0)).astype(np.float32)


def fill(
    rng: np.random.Generator,
    kind: NucleusKind,
    room: Mask,
    direction: Field,
    *,
    keep: float = 1.0,
    spacing_um: float | None = None,
) -> Nuclei:
    """Fill a part of the section with nuclei of a kind."""
    x, y = hexagonal(rng, room.shape, spacing_um or kind.spacing_um)
    kept = room[(y / MAP_MPP).astype(int), (x / MAP_MPP).astype(int)] & (rng.random(len(x)) < keep)
    x, y = x[kept], y[kept]
    angle = direction[(y / MAP_MPP).astype(int), (x / MAP_MPP).astype(int)]
    angle = angle + (1 - np.float32(kind.aligned)) * rng.uniform(-np.pi / 2, np.pi / 2, len(x)).astype(np.float32)
    size = np.clip(rng.normal(1, kind.size_spread, len(x)), 1 - 3 * kind.size_spread, 1 + 3 * kind.size_spread)
    ratio = np.clip(rng.normal(1, 0.08, len(x)), 0.8, 1.2)
    length, width = (
        (kind.length_um * size * ratio).astype(np.float32),
        (kind.width_um * size / ratio).astype(np.float32),
    )
    if kind.paired > 0:
        twin = rng.random(len(x)) < kind.paired
        across = angle + np.float32(np.pi / 2)
        shift_x, shift_y = np.cos(across) * width * 0.49, np.sin(across) * width * 0.49
        x, y = (
            np.concatenate([x - np.where(twin, shift_x, 0), (x + shift_x)[twin]]),
            np.concatenate([y - np.where(twin, shift_y, 0), (y + shift_y)[twin]]),
        )
        length, width = (np.concatenate([values, values[twin]]) for values in (length, width))
        angle = np.concatenate([angle, angle[twin]])
    return Nuclei(kind, x, y, length, width, angle)

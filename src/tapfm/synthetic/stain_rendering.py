"""Render a section as stain amounts: how much haematoxylin, eosin and blood there is at each pixel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import cv2
import numpy as np

from tapfm.runtime.seeding import make_rng
from tapfm.slides.tissue import Mask
from tapfm.synthetic.fields import (
    Float32Array,
    Noise,
    Shape,
    enlarge_rows,
    linear_ramp,
    make_noise,
    render_fibres,
    resize_field,
    sample_rough_noise,
    sample_smooth_noise,
)
from tapfm.synthetic.nuclei import composite_nuclei, render_nuclei
from tapfm.synthetic.section import MAP_MPP, Compartment, TissueSection, draw_voronoi_borders

# Function that resizes a map of the section from MAP_MPP to _TEXTURE_MPP and returns the rows to render.
_ResampleRows: TypeAlias = Callable[[Float32Array], Float32Array]
_HaematoxylinAndEosin: TypeAlias = tuple[Float32Array, Float32Array]  # stain amounts of the rows to render
# um per pixel at which the tissue without nuclei is rendered, for all scanners: its texture is the same at 20x and 40x
_TEXTURE_MPP = 0.5
_TEXTURE_SCALE = MAP_MPP / _TEXTURE_MPP  # texture pixels per map pixel
_STRIP_PX = 128  # number of rows rendered at once, few enough for the CPU cache
_NUCLEI_PER_BATCH = 256  # number of nuclei rendered at once, few enough for the CPU cache


class StainAmounts(NamedTuple):
    """Amount of each stain at each pixel of the slide; `StainingProtocol` defines the colour of one unit.

    Blood is treated as a third stain.
    """

    haematoxylin: Float32Array
    eosin: Float32Array
    blood: Float32Array


@dataclass(frozen=True)
class _Textures:
    """Textures of everything but the nuclei.

    `grain` is noise at _TEXTURE_MPP microns per pixel. The maps of the section have MAP_MPP microns per pixel.
    """

    grain: Noise  # fine noise, in most compartments
    clouds: Float32Array  # coarse noise in epithelium, lumen and lymphoid tissue
    thick_fibres: Float32Array  # noise that `render_fibres` stretches; not a map of the section
    fine_fibres: Float32Array  # like `thick_fibres`, for fine fibres
    stroma_looseness: Float32Array  # noise; where it is high, the stroma has more clefts
    fibre_ripple_px: Float32Array  # shift of the stroma fibres across their direction, in pixels
    secretion: Float32Array  # amount of secretion in lumens, 0 to 1
    thickness: Float32Array  # thickness of the section, relative to its mean
    cell_borders: Float32Array  # blurred mask (0 to 1) of the borders between epithelial cells
    fat_walls: Float32Array  # blurred mask of the walls of fat cells
    near_lumen: Float32Array  # blurred mask of the lumens
    compartment_masks: Mapping[Compartment, Float32Array]  # blurred mask of each compartment except glass


def render_stains(section: TissueSection, mpp: float, *rng_key: int | str) -> StainAmounts:
    """Render the stain amounts of a section at `mpp`; the same arguments give the same stain amounts."""
    spec = section.spec
    texture_hw = round(spec.height_um / _TEXTURE_MPP), round(spec.width_um / _TEXTURE_MPP)
    shape_hw = round(spec.height_um / mpp), round(spec.width_um / mpp)
    textures = _make_textures(make_rng(*rng_key, "texture"), section, texture_hw)
    haematoxylin, eosin = np.empty(texture_hw, np.float32), np.empty(texture_hw, np.float32)
    for top in range(0, texture_hw[0], _STRIP_PX):
        rows = np.s_[top : min(top + _STRIP_PX, texture_hw[0])]
        haematoxylin[rows], eosin[rows] = _render_compartments(section, textures, rows, texture_hw[1])
    blood = _render_red_cells(make_rng(*rng_key, "blood"), section)
    stains = StainAmounts(
        resize_field(haematoxylin, shape_hw), resize_field(eosin, shape_hw), resize_field(blood, shape_hw)
    )
    for nuclei in section.nuclei:
        for start in range(0, len(nuclei), _NUCLEI_PER_BATCH):
            batch = nuclei[start : start + _NUCLEI_PER_BATCH]
            cover, density = render_nuclei(make_rng(*rng_key, "nuclei", nuclei.group, start), batch, mpp)
            composite_nuclei(stains.haematoxylin, stains.eosin, batch, cover, density, mpp, eosin_fraction=0.7)
    return stains


def _make_textures(rng: np.random.Generator, section: TissueSection, texture_hw: Shape) -> _Textures:
    map_hw = section.compartments.shape
    return _Textures(
        grain=make_noise(rng, texture_hw, 1.9 / _TEXTURE_MPP),
        clouds=sample_rough_noise(rng, map_hw, 24, 3),
        thick_fibres=sample_smooth_noise(rng, (512, 512), 4.0),
        fine_fibres=sample_smooth_noise(rng, (512, 512), 4.0),
        stroma_looseness=sample_rough_noise(rng, map_hw, 180, 2),
        fibre_ripple_px=2.6 * sample_smooth_noise(rng, map_hw, 26) + 1.3 * sample_smooth_noise(rng, map_hw, 9),
        secretion=linear_ramp(sample_rough_noise(rng, map_hw, 90, 4, 0.6) - 1.1, 1.8),
        thickness=1 + 0.07 * sample_smooth_noise(rng, map_hw, 350),
        cell_borders=_blur_mask(_draw_epithelial_cell_borders(section), 0.7),
        fat_walls=_blur_mask(section.fat_walls, 0.9),
        near_lumen=_blur_mask(section.compartments == Compartment.LUMEN, 2.0),
        compartment_masks={
            each: _blur_mask(section.compartments == each, 0.9) for each in Compartment if each is not Compartment.GLASS
        },
    )


def _blur_mask(mask: Mask, blur_px: float) -> Float32Array:
    return np.asarray(cv2.GaussianBlur(mask.astype(np.float32), (0, 0), blur_px), np.float32)


def _draw_epithelial_cell_borders(section: TissueSection) -> Mask:
    epithelial = {"epithelium", *(focus.name for focus in section.spec.foci)}
    cells = [each for each in section.nuclei if each.group in epithelial]
    if not cells:
        return np.zeros(section.compartments.shape, bool)
    x_um, y_um = np.concatenate([each.x_um for each in cells]), np.concatenate([each.y_um for each in cells])
    return draw_voronoi_borders(x_um, y_um, section.compartments.shape)


def _render_compartments(section: TissueSection, textures: _Textures, rows: slice, width: int) -> _HaematoxylinAndEosin:
    """Render the haematoxylin and eosin of some rows of the section at _TEXTURE_MPP, without nuclei and blood."""

    def resample_rows(section_map: Float32Array) -> Float32Array:
        return enlarge_rows(section_map, _TEXTURE_SCALE, rows.start, rows.stop, width)

    haematoxylin = np.zeros((rows.stop - rows.start, width), np.float32)
    eosin = np.zeros_like(haematoxylin)
    grain_rows = textures.grain.render_rows(rows.start, rows.stop, width)
    for compartment, render in _COMPARTMENT_RENDERERS.items():
        cover = resample_rows(textures.compartment_masks[compartment])
        if cover.any():
            h, e = render(section, textures, grain_rows, resample_rows)
            haematoxylin += cover * np.maximum(h, 0)
            eosin += cover * np.maximum(e, 0)
    thickness = resample_rows(textures.thickness)
    return haematoxylin * thickness, eosin * thickness


# Each of the next six functions renders some rows as if they consisted of one compartment only. `grain_rows` are the
# same rows of `textures.grain`.


def _render_stroma(
    section: TissueSection, textures: _Textures, grain_rows: Float32Array, resample_rows: _ResampleRows
) -> _HaematoxylinAndEosin:
    """Render collagen: wavy fibres with clefts between them, of varying density."""
    along = resample_rows(section.along_fibres_px)
    across = resample_rows(section.across_fibres_px + textures.fibre_ripple_px)
    thick = render_fibres(textures.thick_fibres, along, across, 46, 7.5)
    fine = render_fibres(textures.fine_fibres, along, across, 15, 1.9)
    solid = linear_ramp(0.8 * thick + 0.75 * fine - 0.5 * resample_rows(textures.stroma_looseness) + 0.85, 1.3)
    eosin = (0.56 + 0.10 * thick + 0.14 * fine + 0.10 * grain_rows) * (0.2 + 0.8 * solid)
    return 0.07 + 0.04 * thick + 0.03 * fine + 0.03 * grain_rows, eosin


def _render_epithelium(
    _: TissueSection, textures: _Textures, grain_rows: Float32Array, resample_rows: _ResampleRows
) -> _HaematoxylinAndEosin:
    """Render cytoplasm with faint cell borders, denser near a lumen."""
    clouds = resample_rows(textures.clouds)
    eosin = (
        0.46
        + 0.09 * clouds
        + 0.06 * grain_rows
        + 0.2 * resample_rows(textures.cell_borders)
        + 0.35 * resample_rows(textures.near_lumen)
    )
    return 0.27 + 0.05 * clouds + 0.04 * grain_rows, eosin


def _render_lumen(
    _: TissueSection, textures: _Textures, __: Float32Array, resample_rows: _ResampleRows
) -> _HaematoxylinAndEosin:
    """Render a mostly empty lumen with some secretion."""
    secretion = resample_rows(textures.secretion)
    return 0.01 + 0.06 * secretion, (0.24 + 0.07 * resample_rows(textures.clouds)) * secretion


def _render_fat(
    _: TissueSection, textures: _Textures, grain_rows: Float32Array, resample_rows: _ResampleRows
) -> _HaematoxylinAndEosin:
    """Render empty fat cells with thin walls."""
    walls = resample_rows(textures.fat_walls)
    return 0.1 * walls, np.clip(1.5 * walls, 0, 0.6) * (1 + 0.2 * grain_rows)


def _render_lymphoid(
    _: TissueSection, textures: _Textures, grain_rows: Float32Array, resample_rows: _ResampleRows
) -> _HaematoxylinAndEosin:
    """Render the pale tissue between lymphocytes."""
    clouds = resample_rows(textures.clouds)
    return 0.10 + 0.03 * clouds, 0.34 + 0.09 * clouds + 0.06 * grain_rows


def _render_vessel(
    section: TissueSection, _: _Textures, grain_rows: Float32Array, resample_rows: _ResampleRows
) -> _HaematoxylinAndEosin:
    """Render a thin vessel wall around a clear lumen."""
    wall = linear_ramp(3.2 - resample_rows(section.depth_in_vessel_um), 1.2)
    return 0.08 * wall, (0.5 + 0.1 * grain_rows) * wall


_COMPARTMENT_RENDERERS: Mapping[
    Compartment, Callable[[TissueSection, _Textures, Float32Array, _ResampleRows], _HaematoxylinAndEosin]
] = {
    Compartment.STROMA: _render_stroma,
    Compartment.EPITHELIUM: _render_epithelium,
    Compartment.LUMEN: _render_lumen,
    Compartment.FAT: _render_fat,
    Compartment.LYMPHOID: _render_lymphoid,
    Compartment.VESSEL: _render_vessel,
}


def _render_red_cells(rng: np.random.Generator, section: TissueSection) -> Float32Array:
    """Render red blood cells, discs with a diameter of about 5.5 um, in some of the vessels, at _TEXTURE_MPP."""
    plane = np.zeros([round(side * MAP_MPP / _TEXTURE_MPP) for side in section.compartments.shape], np.uint8)
    rows, columns = np.nonzero(
        (section.depth_in_vessel_um > 3.5) & (sample_smooth_noise(rng, section.compartments.shape, 150) > 0)
    )
    if len(rows):
        chosen = rng.choice(len(rows), size=max(1, len(rows) // 28), replace=False)
        subpixel_bits = 4
        for row, column, radius_um, level in zip(
            rows[chosen],
            columns[chosen],
            rng.uniform(2.4, 3.1, len(chosen)),
            rng.integers(110, 190, len(chosen)),
            strict=True,
        ):
            centre = [int(position * MAP_MPP / _TEXTURE_MPP * 2**subpixel_bits) for position in (column, row)]
            radius = int(radius_um / _TEXTURE_MPP * 2**subpixel_bits)
            cv2.circle(plane, centre, radius, int(level), -1, cv2.LINE_AA, subpixel_bits)
    return cv2.GaussianBlur(plane.astype(np.float32) / 255, (0, 0), 0.8)

"""Ground truth of a synthetic slide: its compartments, and the tiles that contain the signal of each target."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from tapfm.errors import InputError
from tapfm.runtime.csv_files import csv_text
from tapfm.slides.annotations import build_qupath_features
from tapfm.slides.slide import Box, Thumbnail
from tapfm.slides.tissue import Mask
from tapfm.synthetic.section import Compartment
from tapfm.tiles.grid import Positions, TileSpec, mask_coverage, tile_grid

# A tile contains the signal of a target if the focus of this target covers at least this fraction of the tile.
SIGNAL_THRESHOLD = 0.1
_FIRST_FOCUS_VALUE = 16  # pixel value of the first focus in the truth image; lower values are compartments
# by name, in the order of the values of Compartment
_COMPARTMENT_COLOURS: dict[str, tuple[int, int, int]] = {
    "glass": (255, 255, 255),
    "stroma": (244, 187, 204),
    "epithelium": (150, 110, 190),
    "lumen": (226, 240, 250),
    "fat": (250, 236, 170),
    "lymphoid": (60, 70, 150),
    "vessel": (220, 70, 60),
}
_FOCUS_COLOURS = [(0, 140, 60), (240, 130, 0), (0, 130, 200), (200, 0, 120), (120, 120, 120), (70, 70, 70)]


@dataclass(frozen=True)
class SlideTruth:
    """Ground truth of a slide: a map of its compartments (types of tissue) and a map of its foci.

    A focus is a region of epithelium with altered nuclei, see `Focus`. Both maps cover the whole slide at MAP_MPP
    microns per pixel.
    """

    compartments: npt.NDArray[np.uint8]  # values of Compartment
    foci_map: npt.NDArray[np.uint8]  # 0: no focus; otherwise 1 + the index in `focus_names`
    focus_names: tuple[str, ...]  # positive targets first, then lookalikes
    width_px0: int  # width of the slide
    height_px0: int  # height of the slide
    slide_mpp: float  # microns per pixel of level 0

    @property
    def tissue(self) -> Mask:
        """Mask of all tissue."""
        return np.asarray(self.compartments != Compartment.GLASS)

    @property
    def epithelium(self) -> Mask:
        """Mask of the epithelium, which includes all foci."""
        return np.asarray(self.compartments == Compartment.EPITHELIUM)

    def default_tile_grid(self) -> tuple[Positions, int]:
        """Return positions and side (level-0 pixels) of the tiles of the default grid: 224 px at 0.5 um per pixel."""
        spec = TileSpec()
        whole = Box(0, 0, self.width_px0, self.height_px0)
        return tile_grid(whole, spec, self.slide_mpp), spec.side_px0(self.slide_mpp)

    def coverage(self, mask: Mask, positions: Positions, side_px0: int) -> npt.NDArray[np.float64]:
        """Return the fraction of each tile that a mask of this slide covers."""
        return mask_coverage(mask, self.make_placeholder_thumbnail(mask), positions, side_px0)

    def signal_coverage(self, target: str, positions: Positions, side_px0: int) -> npt.NDArray[np.float64]:
        """Return the fraction of each tile that the focus of a target covers; 0 if the target is negative."""
        if target not in self.focus_names:
            return np.zeros(len(positions))
        return self.coverage(np.asarray(self.foci_map == self.focus_names.index(target) + 1), positions, side_px0)

    def make_placeholder_thumbnail(self, mask: Mask) -> Thumbnail:
        """Return an all-black thumbnail of the size of a mask, to map mask pixels to level-0 coordinates."""
        return Thumbnail(np.broadcast_to(np.uint8(0), (*mask.shape, 3)), Box(0, 0, self.width_px0, self.height_px0))


def encode_truth_image(truth: SlideTruth) -> bytes:
    """Encode compartments and foci as a PNG file with a colour palette: the truth image, `truth/ID.png`."""
    focus_values = truth.foci_map + np.uint8(_FIRST_FOCUS_VALUE - 1)
    values = np.where(truth.foci_map > 0, focus_values, truth.compartments).astype(np.uint8)
    image = Image.fromarray(values, mode="P")
    palette = np.full((256, 3), 255, np.uint8)
    palette[: len(_COMPARTMENT_COLOURS)] = list(_COMPARTMENT_COLOURS.values())
    palette[_FIRST_FOCUS_VALUE : _FIRST_FOCUS_VALUE + len(_FOCUS_COLOURS)] = _FOCUS_COLOURS
    image.putpalette(palette.tobytes())
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def truth_metadata(truth: SlideTruth) -> dict[str, object]:
    """Return the contents of `truth/ID.json`: size and mpp of the slide, and meaning of the truth image's values."""
    return {
        "width_px0": truth.width_px0,
        "height_px0": truth.height_px0,
        "mpp": truth.slide_mpp,
        "foci": list(truth.focus_names),
        "values": {name: index for index, name in enumerate(_COMPARTMENT_COLOURS)}
        | {name: _FIRST_FOCUS_VALUE + index for index, name in enumerate(truth.focus_names)},
    }


def read_truth(folder: Path, slide_id: str) -> SlideTruth:
    """Read the ground truth of a slide. `folder` is the folder `truth` of a cohort generated by `tapfm synth`."""
    image_path, metadata_path = folder / f"{slide_id}.png", folder / f"{slide_id}.json"
    try:
        metadata = json.loads(metadata_path.read_text(encoding="utf-8"))
        with Image.open(image_path) as image:
            values = np.asarray(image)
        size_and_mpp = int(metadata["width_px0"]), int(metadata["height_px0"]), float(metadata["mpp"])
        focus_names = tuple(str(name) for name in metadata["foci"])
    except FileNotFoundError as error:
        raise InputError(
            f"{folder} contains no ground truth of slide {slide_id}.",
            hint="Pass the folder `truth` of a cohort that was generated by tapfm synth.",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"The ground truth of slide {slide_id} in {folder} is damaged ({type(error).__name__}: {error}).",
            hint="Run the same tapfm synth command again; it regenerates damaged files.",
        ) from error
    foci_map = np.where(values >= _FIRST_FOCUS_VALUE, values - _FIRST_FOCUS_VALUE + 1, 0).astype(np.uint8)
    compartments = np.where(foci_map > 0, np.uint8(Compartment.EPITHELIUM), values).astype(np.uint8)
    return SlideTruth(compartments, foci_map, focus_names, *size_and_mpp)


def encode_truth_geojson(truth: SlideTruth, artefacts: Mapping[str, Mask], slide_id: str) -> bytes:
    """Encode foci and artefacts as GeoJSON annotations for QuPath. artefacts: masks by name."""
    features = []
    for index, name in enumerate(truth.focus_names):
        mask = np.asarray(truth.foci_map == index + 1)
        features += build_qupath_features(
            mask, truth.make_placeholder_thumbnail(mask), (0, 0), slide_id, name, _FOCUS_COLOURS[index]
        )
    for name, mask in artefacts.items():
        features += build_qupath_features(
            mask, truth.make_placeholder_thumbnail(mask), (0, 0), slide_id, name, (90, 90, 90)
        )
    return json.dumps({"type": "FeatureCollection", "features": features}).encode()


def tile_coverage_rows(slide_id: str, truth: SlideTruth, targets: Sequence[str]) -> list[list[str]]:
    """Return the rows of `truth/tiles.csv` for one slide: one row for each tile of the default grid."""
    positions, side_px0 = truth.default_tile_grid()
    tissue = truth.coverage(truth.tissue, positions, side_px0)
    signals = [truth.signal_coverage(each, positions, side_px0) for each in targets]
    return [
        [slide_id, str(x), str(y), str(side_px0), f"{tissue[i]:.3f}", *(f"{each[i]:.3f}" for each in signals)]
        for i, (x, y) in enumerate(positions)
    ]


def encode_tile_table(rows: Sequence[Sequence[str]], targets: Sequence[str]) -> bytes:
    """Encode `truth/tiles.csv`: a row per tile, with the fraction that is tissue or has the signal of a target."""
    return csv_text(["slide_id", "x_px0", "y_px0", "side_px0", "tissue", *targets], rows).encode()

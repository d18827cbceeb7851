"""Read and write tile positions in HDF5, one file per slide, in the layout of TRIDENT or CLAM.

Files written by TRIDENT and CLAM can be read too.

TRIDENT  <slide>_patches.h5   `coords` (N, 2) int64, top left corners in level-0 pixels. `patch_size` is the side of a
                              tile in pixels, `patch_size_level0` its side in level-0 pixels. TRIDENT computes the
                              latter as patch_size * level0_magnification / target_magnification, so tapfm stores as
                              `level0_magnification` the value that gives the rounded side. For tiles of 224 px at
                              0.5 um per pixel: 40 on a slide of 0.25 um per pixel, 37.77 on one of 0.2645.
CLAM     <slide>.h5           `patch_size` is the side in pixels of `patch_level`: 448 at 40x where TRIDENT stores 224.

All attributes are attributes of the dataset. tapfm adds attributes under names that neither tool uses.

With `--edge-tiles pad`, a dataset `padded` (N,) bool beside `coords` marks the tiles that extend past the right or
bottom edge. Both tools read only `coords`. The mark is stored because it cannot be computed from the other contents:
the edge is that of the scanned area, which is smaller than the slide in some formats (MRXS, SCN).
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from tapfm.errors import TileStoreError
from tapfm.runtime.files import fingerprint, write_atomically
from tapfm.slides.scale import nominal_mpp
from tapfm.tiles.grid import Positions

Layout = Literal["trident", "clam"]
LAYOUTS: tuple[Layout, ...] = ("trident", "clam")
_SUFFIXES: dict[Layout, str] = {"trident": "_patches.h5", "clam": ".h5"}
PADDED_DATASET = "padded"
_REGENERATE_HINT = "Create it again with tapfm tile."


@dataclass(frozen=True)
class TileSet:
    """The tiles of a slide: squares of `side_px0` level-0 pixels at `positions`, read as `tile_px` x `tile_px` pixels.

    Values that a file of another tool does not contain are None; a missing overlap is 0.
    """

    slide_id: str
    positions: Positions
    side_px0: int
    tile_px: int
    target_mpp: float | None = None
    slide_mpp: float | None = None
    overlap_px: int = 0
    size_px0: tuple[int, int] | None = None  # width and height of the slide
    fingerprint: str | None = None
    summary: Mapping[str, Any] | None = None  # row of summary.csv
    spec: Mapping[str, Any] | None = None  # TileSpec.to_dict()
    padded: NDArray[np.bool_] | None = None  # which tiles extend past the edge; None without --edge-tiles pad

    def __len__(self) -> int:
        return len(self.positions)

    def select(self, rows: NDArray[np.int64]) -> TileSet:
        """Return the tiles in these rows."""
        padded = None if self.padded is None else self.padded[rows]
        return replace(self, positions=self.positions[rows], padded=padded)

    @property
    def tiling_settings(self) -> dict[str, Any] | None:
        """TileSpec fields that the file contains, or None if it does not even contain the target mpp."""
        if self.spec is not None:
            return dict(self.spec)
        if self.target_mpp is None:
            return None
        return {"tile_px": self.tile_px, "mpp": self.target_mpp, "overlap_px": self.overlap_px}

    @property
    def content_digest(self) -> str:
        """Digest of positions, tile size and slide size. It does not depend on the version or on other settings."""
        positions = hashlib.sha256(np.ascontiguousarray(self.positions, np.int64).tobytes()).hexdigest()
        return fingerprint(positions, self.side_px0, self.tile_px, self.size_px0)[:16]

    @property
    def achieved_mpp(self) -> float | None:
        """Exact microns per pixel of the tiles; differs from `target_mpp`, because the side is rounded."""
        return None if self.slide_mpp is None else self.side_px0 * self.slide_mpp / self.tile_px


def tile_file_path(folder: Path, slide_id: str, layout: Layout) -> Path:
    """Return the path of a slide's tile file; its name is the one that the tool of the layout uses."""
    return folder / "patches" / f"{slide_id}{_SUFFIXES[layout]}"


def read_slide_tiles(folder: Path, slide_id: str) -> TileSet:
    """Read the tile file of a slide, in TRIDENT's or CLAM's layout. Raise TileStoreError if it is missing or empty."""
    path = next((path for layout in LAYOUTS if (path := tile_file_path(folder, slide_id, layout)).exists()), None)
    if path is None:
        raise TileStoreError(f"{folder / 'patches'} contains no tile file of slide {slide_id}.")
    tiles = read_tiles(path)
    if not len(tiles):
        raise TileStoreError(f"{path} contains no tiles.")
    return tiles


def write_tiles(folder: Path, tiles: TileSet, layout: Layout) -> Path:
    """Write the tile file of a slide atomically; return its path."""
    path = tile_file_path(folder, tiles.slide_id, layout)
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        dataset = file.create_dataset("coords", data=tiles.positions.astype(np.int64))
        attributes = trident_attributes(tiles) if layout == "trident" else _clam_attributes(tiles)
        for name, value in (attributes | tapfm_attributes(tiles)).items():
            dataset.attrs[name] = value
        if tiles.padded is not None:
            file.create_dataset(PADDED_DATASET, data=tiles.padded)
    write_atomically(path, buffer.getvalue())
    return path


def trident_attributes(tiles: TileSet) -> dict[str, Any]:
    assert tiles.target_mpp is not None
    assert tiles.size_px0 is not None
    magnification = nominal_mpp(tiles.target_mpp)  # magnification = 10 / mpp, and mpp = 10 / magnification
    return {
        "patch_size": tiles.tile_px,
        "patch_size_level0": tiles.side_px0,
        "level0_magnification": _to_int_if_whole(magnification * tiles.side_px0 / tiles.tile_px),
        "target_magnification": _to_int_if_whole(magnification),
        "overlap": tiles.overlap_px,
        "name": tiles.slide_id,
        "savetodir": "patches",
        "level0_width": tiles.size_px0[0],
        "level0_height": tiles.size_px0[1],
    }


def _clam_attributes(tiles: TileSet) -> dict[str, Any]:
    """Return the attributes of CLAM, always for level 0, where tiles can have any side."""
    assert tiles.size_px0 is not None
    return {
        "patch_size": tiles.side_px0,
        "patch_level": 0,
        "downsample": np.array([1.0, 1.0]),
        "downsampled_level_dim": np.array(tiles.size_px0),
        "level_dim": np.array(tiles.size_px0),
        "name": tiles.slide_id,
        "save_path": "patches",
    }


def tapfm_attributes(tiles: TileSet) -> dict[str, Any]:
    """Return the attributes that tapfm adds to both layouts."""
    assert tiles.size_px0 is not None
    return {
        "tile_px": tiles.tile_px,
        "side_px0": tiles.side_px0,
        "overlap_px": tiles.overlap_px,
        "target_mpp": tiles.target_mpp,
        "slide_mpp": tiles.slide_mpp,
        "achieved_mpp": tiles.achieved_mpp,
        "slide_width_px0": tiles.size_px0[0],
        "slide_height_px0": tiles.size_px0[1],
        "tapfm_fingerprint": tiles.fingerprint or "",
        "tapfm_summary": json.dumps(dict(tiles.summary or {}), sort_keys=True),
        "tapfm_spec": json.dumps(dict(tiles.spec or {}), sort_keys=True),
    }


def _to_int_if_whole(value: float) -> int | float:
    """Return an int for a whole number, as the other tools store it."""
    return round(value) if abs(value - round(value)) < 1e-9 else value


def read_tiles(path: Path) -> TileSet:
    """Read a tile file of tapfm, TRIDENT or CLAM."""
    try:
        with h5py.File(path, "r") as file:
            if "coords" not in file:
                raise TileStoreError(
                    f"{path} contains no dataset `coords` (datasets: {', '.join(file) or 'none'}).",
                    hint="If it is a tile file, it is incomplete: delete it and create it again.",
                )
            attributes = {name: value for name, value in file["coords"].attrs.items() if not is_stored_none(value)}
            positions = np.asarray(file["coords"])
            padded = np.asarray(file[PADDED_DATASET], bool) if PADDED_DATASET in file else None
    except TileStoreError:
        raise
    except Exception as error:  # a damaged file can make h5py raise anything
        raise TileStoreError(f"{path} cannot be read as HDF5 ({error}).", hint=_REGENERATE_HINT) from error
    if positions.size == 0:
        positions = np.empty((0, 2), np.int64)
    if positions.ndim != 2 or positions.shape[1] != 2:
        raise TileStoreError(
            f"{path}: `coords` has shape {positions.shape} instead of (tiles, 2).", hint=_REGENERATE_HINT
        )
    if padded is not None and padded.shape != (len(positions),):
        raise TileStoreError(
            f"{path}: `{PADDED_DATASET}` has shape {padded.shape} instead of ({len(positions)},).",
            hint=_REGENERATE_HINT,
        )
    try:
        return replace(_parse_tile_set(path, positions.astype(np.int64), attributes), padded=padded)
    except (KeyError, ValueError, TypeError) as error:
        raise TileStoreError(
            f"{path} has a missing or invalid attribute ({type(error).__name__}: {error}).", hint=_REGENERATE_HINT
        ) from error


def _parse_tile_set(path: Path, positions: Positions, attributes: Mapping[str, Any]) -> TileSet:
    """Detect which tool wrote the file, and parse its attributes."""
    slide_id = str(attributes.get("name") or path.name.removesuffix(".h5").removesuffix("_patches"))
    if "tapfm_fingerprint" in attributes:
        return _parse_tapfm_tiles(slide_id, positions, attributes)
    if "patch_size_level0" in attributes:
        return _parse_trident_tiles(slide_id, positions, attributes)
    if "patch_level" in attributes and "patch_size" in attributes:
        return _parse_clam_tiles(path, slide_id, positions, attributes)
    raise TileStoreError(
        f"{path} does not contain the size of its tiles (attributes of `coords`: {', '.join(attributes) or 'none'}).",
        hint="Create the tiles again in another folder: tapfm tile COHORT.csv --out DIR",
    )


def is_stored_none(value: Any) -> bool:
    """Return whether an attribute is the string 'None', which TRIDENT stores for None."""
    return isinstance(value, str | bytes) and str(value) in ("None", "b'None'")


def _parse_tapfm_tiles(slide_id: str, positions: Positions, attributes: Mapping[str, Any]) -> TileSet:
    return TileSet(
        slide_id,
        positions,
        side_px0=int(attributes["side_px0"]),
        tile_px=int(attributes["tile_px"]),
        target_mpp=float(attributes["target_mpp"]),
        slide_mpp=float(attributes["slide_mpp"]),
        overlap_px=int(attributes["overlap_px"]),
        size_px0=(int(attributes["slide_width_px0"]), int(attributes["slide_height_px0"])),
        fingerprint=str(attributes["tapfm_fingerprint"]),
        summary=json.loads(attributes["tapfm_summary"]),
        spec=json.loads(attributes.get("tapfm_spec", "{}")) or None,
    )


def _parse_trident_tiles(slide_id: str, positions: Positions, attributes: Mapping[str, Any]) -> TileSet:
    magnification = attributes.get("target_magnification")
    width_px0, height_px0 = attributes.get("level0_width"), attributes.get("level0_height")
    return TileSet(
        slide_id,
        positions,
        side_px0=int(attributes["patch_size_level0"]),
        tile_px=int(attributes["patch_size"]),
        target_mpp=None if magnification is None else nominal_mpp(float(magnification)),
        overlap_px=int(attributes.get("overlap", 0)),
        size_px0=None if width_px0 is None or height_px0 is None else (int(width_px0), int(height_px0)),
    )


def _parse_clam_tiles(path: Path, slide_id: str, positions: Positions, attributes: Mapping[str, Any]) -> TileSet:
    """Parse a file of CLAM. `patch_size` is in pixels of `patch_level`; older files have a `custom_downsample`."""
    patch_px, level = int(attributes["patch_size"]), int(attributes["patch_level"])
    if level > 0 and "downsample" not in attributes:
        raise TileStoreError(
            f"{path} contains tiles of level {level}, but no attribute `downsample`, so their size is unknown.",
            hint=_REGENERATE_HINT,
        )
    downsample = float(np.ravel(attributes.get("downsample", 1.0))[0])
    custom = int(attributes.get("custom_downsample", 1))
    size = attributes.get("level_dim") if level == 0 else None  # size of `patch_level`
    return TileSet(
        slide_id,
        positions,
        side_px0=round(patch_px * downsample),
        tile_px=patch_px // custom,
        size_px0=None if size is None else (int(size[0]), int(size[1])),
    )

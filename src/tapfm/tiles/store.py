"""Tile positions in HDF5, one file per slide, in TRIDENT's layout or CLAM's; both are read back, also from those tools.

TRIDENT  <slide>_patches.h5   `coords` (N, 2) int64, level-0 top left; `patch_size` is the tile's side in pixels,
                              `patch_size_level0` its side on the slide. Its reader takes that side again from
                              patch_size * level0_magnification / target_magnification, so the magnification we store
                              is the effective one: 40 at 0.25 um per pixel, 37.77 at 0.2645.
CLAM     <slide>.h5           `patch_size` is the side at `patch_level`, so 448 where TRIDENT says 224 at 40x.

All attributes stand on the dataset. Ours come on top, under names neither of them uses.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from tapfm.errors import TileStoreError
from tapfm.runtime.files import fingerprint, write_atomically
from tapfm.slides.scale import nominal_mpp
from tapfm.tiles.grid import Positions

Layout = Literal["trident", "clam"]
LAYOUTS: tuple[Layout, ...] = ("trident", "clam")
_SUFFIXES: dict[Layout, str] = {"trident": "_patches.h5", "clam": ".h5"}


@dataclass(frozen=True)
class TileSet:
    """The tiles of a slide: squares of `side_px0` level-0 pixels at `positions`, each to be read as `tile_px`.

    What another tool's file does not say is None.
    """

    slide_id: str
    positions: Positions
    side_px0: int
    tile_px: int
    target_mpp: float | None = None
    slide_mpp: float | None = None
    overlap_px: int = 0
    size_px0: tuple[int, int] | None = None
    fingerprint: str | None = None
    summary: Mapping[str, Any] | None = None  # what `tapfm tile` found, for its table
    spec: Mapping[str, Any] | None = None  # the settings that decided which tiles there are, as TileSpec has them

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def tiling_settings(self) -> dict[str, Any] | None:
        """How they were laid, in the words of TileSpec; as much of it as is known."""
        if self.spec is not None:
            return dict(self.spec)
        if self.target_mpp is None:
            return None
        return {"tile_px": self.tile_px, "mpp": self.target_mpp, "overlap_px": self.overlap_px}

    @property
    def content_digest(self) -> str:
        """Digest of the tiles themselves: positions, side and slide size, whichever code or settings made them."""
        positions = hashlib.sha256(np.ascontiguousarray(self.positions, np.int64).tobytes()).hexdigest()
        return fingerprint(positions, self.side_px0, self.tile_px, self.size_px0)[:16]

    @property
    def achieved_mpp(self) -> float | None:
        """Microns per pixel at which tiles come out; differs from the target by less than half a level-0 pixel."""
        return None if self.slide_mpp is None else self.side_px0 * self.slide_mpp / self.tile_px


def tile_file_path(folder: Path, slide_id: str, layout: Layout) -> Path:
    """Say where a slide's file is, under the name that the layout's own tool gives it."""
    return folder / "patches" / f"{slide_id}{_SUFFIXES[layout]}"


def find_tiles(folder: Path, slide_id: str) -> TileSet:
    """Find a slide's tiles, in whichever layout; none at all are refused."""
    path = next((path for layout in LAYOUTS if (path := tile_file_path(folder, slide_id, layout)).exists()), None)
    if path is None:
        raise TileStoreError(f"There is no file of its tiles in {folder / 'patches'}.")
    tiles = read_tiles(path)
    if not len(tiles):
        raise TileStoreError(f"{path} has no tiles.")
    return tiles


def write_tiles(folder: Path, tiles: TileSet, layout: Layout) -> Path:
    """Write a slide's file, whole or not at all."""
    path = tile_file_path(folder, tiles.slide_id, layout)
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        dataset = file.create_dataset("coords", data=tiles.positions.astype(np.int64))
        attributes = trident_attributes(tiles) if layout == "trident" else _clam_attributes(tiles)
        for name, value in (attributes | tapfm_attributes(tiles)).items():
            dataset.attrs[name] = value
    write_atomically(path, buffer.getvalue())
    return path


def trident_attributes(tiles: TileSet) -> dict[str, Any]:
    """Name things as TRIDENT does."""
    assert tiles.target_mpp is not None
    assert tiles.size_px0 is not None
    magnification = nominal_mpp(tiles.target_mpp)  # the relation is its own inverse
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
    """Name things as CLAM does: always at level 0, where every side is possible."""
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
    """Keep what neither layout has room for."""
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
    """Write 40.0 as 40, as the other tools do."""
    return round(value) if abs(value - round(value)) < 1e-9 else value


def read_tiles(path: Path) -> TileSet:
    """Read a slide's file, ours or one that TRIDENT or CLAM wrote."""
    try:
        with h5py.File(path, "r") as file:
            if "coords" not in file:
                raise TileStoreError(
                    f"{path} has no dataset `coords`, only: {', '.join(file) or 'nothing'}.",
                    hint="Tile positions are in the files of a folder `patches`.",
                )
            attributes = {name: value for name, value in file["coords"].attrs.items() if not is_stored_none(value)}
            positions = np.asarray(file["coords"])
    except TileStoreError:
        raise
    except Exception as error:  # damage shows in many ways
        raise TileStoreError(f"{path} cannot be read as HDF5 ({error}).", hint="Make it again: tapfm tile") from error
    if positions.size == 0:
        positions = np.empty((0, 2), np.int64)
    if positions.ndim != 2 or positions.shape[1] != 2:
        raise TileStoreError(
            f"{path}: `coords` has the shape {positions.shape}, not (tiles, 2).", hint="Use another file."
        )
    try:
        return _parse_tile_set(path, positions.astype(np.int64), attributes)
    except (KeyError, ValueError, TypeError) as error:
        raise TileStoreError(
            f"{path} has a damaged attribute ({type(error).__name__}: {error}).", hint="Make it again: tapfm tile"
        ) from error


def _parse_tile_set(path: Path, positions: Positions, attributes: Mapping[str, Any]) -> TileSet:
    """Tell whose file it is."""
    slide_id = str(attributes.get("name") or path.name.removesuffix(".h5").removesuffix("_patches"))
    if "tapfm_fingerprint" in attributes:
        return _parse_tapfm_tiles(slide_id, positions, attributes)
    if "patch_size_level0" in attributes:
        return _parse_trident_tiles(slide_id, positions, attributes)
    if "patch_level" in attributes and "patch_size" in attributes:
        return _parse_clam_tiles(path, slide_id, positions, attributes)
    raise TileStoreError(
        f"{path}: `coords` does not say how large its tiles are (attributes: {', '.join(attributes) or 'none'}).",
        hint="Files of features do not either: give the files of a folder `patches`.",
    )


def is_stored_none(value: Any) -> bool:
    """Recognise how TRIDENT stores None."""
    return isinstance(value, str | bytes) and str(value) in ("None", "b'None'")


def _parse_tapfm_tiles(slide_id: str, positions: Positions, attributes: Mapping[str, Any]) -> TileSet:
    """Read a file of ours, in either layout."""
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
    """Read a file that TRIDENT wrote."""
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
    """Read a file that CLAM wrote: its size is that of `patch_level`, and older files shrink it once more."""
    patch_px, level = int(attributes["patch_size"]), int(attributes["patch_level"])
    if level > 0 and "downsample" not in attributes:
        raise TileStoreError(
            f"{path}: tiles of level {level}, but no `downsample` to say how large they are.",
            hint="Make it again: tapfm tile",
        )
    downsample = float(np.ravel(attributes.get("downsample", 1.0))[0])
    custom = int(attributes.get("custom_downsample", 1))
    size = attributes.get("level_dim") if level == 0 else None  # that of the tiles' own level
    return TileSet(
        slide_id,
        positions,
        side_px0=round(patch_px * downsample),
        tile_px=patch_px // custom,
        size_px0=None if size is None else (int(size[0]), int(size[1])),
    )

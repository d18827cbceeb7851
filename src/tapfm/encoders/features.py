"""Read and write the features of a slide, one file per slide; files of TRIDENT, CLAM and STAMP can be read too.

tapfm    <slide>.h5           `features` (N, D) float32 and `coords` (N, 2), top left in level-0 pixels, in the layout
                              of TRIDENT; `attention` (N,) float32, the raw attention r of eq. 1; `padded` (N,)
                              bool, if the tile file has it
TRIDENT  <slide>.h5           `features` (N, D) or (1, N, D), and `coords`, each described by its attributes
CLAM     h5_files/<slide>.h5  the same without attributes; pt_files/<slide>.pt contains only the features, as a tensor
STAMP    <slide>.h5           `feats` (N, D) float16; `coords` in microns, which cannot be converted without the mpp, or
                              in pixels if the attribute `unit` is px

Only files of tapfm contain the raw attention. Aggregators that use it need such files.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from tapfm.errors import FeatureStoreError
from tapfm.runtime.files import write_atomically
from tapfm.tiles.grid import Positions
from tapfm.tiles.store import PADDED_DATASET, TileSet, is_stored_none, tapfm_attributes, trident_attributes

FeatureFormat = Literal["tapfm", "TRIDENT", "CLAM", "STAMP", "pt"]

# Version of the features. Increase it when the features of the same tiles change (readers, resizing, normalisation,
# encoders). Slides that were embedded by an older version are then embedded again. tests/versions/ fails if the output
# changes and this number does not.
FEATURES_VERSION = 1

FINGERPRINT_ATTRIBUTE = "tapfm_fingerprint"  # only files of tapfm have this attribute
_REDO_HINT = "Create the file again, for example with tapfm embed."


@dataclass(frozen=True)
class SlideFeatures:
    """The features of a slide. A field is None if the file, of another tool, does not contain it."""

    slide_id: str
    features: NDArray[np.float32]  # (tiles, D)
    attention: NDArray[np.float32] | None = None  # (tiles,), raw
    positions: Positions | None = None  # (tiles, 2)
    side_px0: int | None = None  # of a tile
    encoder: str | None = None
    fingerprint: str | None = None
    origin: FeatureFormat = "tapfm"

    def __len__(self) -> int:
        return len(self.features)


def find_feature_file(folder: Path, slide_id: str) -> Path | None:
    """Return the feature file of a slide, under any of the names that the supported tools use."""
    names = (f"{slide_id}.h5", f"h5_files/{slide_id}.h5", f"pt_files/{slide_id}.pt", f"{slide_id}.pt")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_fingerprint(path: Path) -> str | None:
    """Read the fingerprint of a complete tapfm file, without its features; None for any other file."""
    try:
        with h5py.File(path, "r") as file:
            return _decode_text(file["features"].attrs[FINGERPRINT_ATTRIBUTE])
    except Exception:  # missing, damaged, or written by another tool
        return None


def write_features(
    path: Path, features: SlideFeatures, tiles: TileSet, *, attributes: Mapping[str, str | int | float]
) -> None:
    """Write the feature file of a slide atomically; `attributes` are stored with the features.

    tiles: the tiles of these features, in the same order. Their positions are stored, not those in `features`.
    """
    _check_arrays(f"Slide '{features.slide_id}'", features.features, tiles.positions, features.attention)
    all_attributes = dict(attributes) | {
        "name": features.slide_id,
        "savetodir": "features",
        "encoder": features.encoder or "None",
        FINGERPRINT_ATTRIBUTE: features.fingerprint or "None",
    }
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        _write_dataset(file, "features", features.features.astype(np.float32, copy=False), all_attributes)
        _write_dataset(file, "coords", tiles.positions.astype(np.int64, copy=False), _coords_attributes(tiles))
        if tiles.padded is not None:
            _write_dataset(file, PADDED_DATASET, tiles.padded, {})
        if features.attention is not None:
            _write_dataset(file, "attention", features.attention.astype(np.float32, copy=False), {})
    write_atomically(path, buffer.getvalue())


def _write_dataset(file: h5py.File, name: str, data: NDArray[Any], attributes: Mapping[str, Any]) -> None:
    dataset = file.create_dataset(name, data=data)
    for key, value in attributes.items():
        dataset.attrs[key] = value


def _coords_attributes(tiles: TileSet) -> dict[str, Any]:
    """Return the attributes of the tile coordinates, without those that are unknown (files of other tools)."""
    if tiles.target_mpp is not None and tiles.slide_mpp is not None and tiles.size_px0 is not None:
        return trident_attributes(tiles) | tapfm_attributes(tiles)
    unknown: set[str] = set()
    if tiles.target_mpp is None:
        unknown |= {"level0_magnification", "target_magnification"}
    if tiles.size_px0 is None:
        unknown |= {"level0_width", "level0_height"}
    filled = replace(tiles, target_mpp=tiles.target_mpp or 1.0, size_px0=tiles.size_px0 or (0, 0))
    return {name: value for name, value in trident_attributes(filled).items() if name not in unknown}


class FeatureMetadata(NamedTuple):
    """Metadata of a feature file."""

    size: int  # D
    has_attention: bool
    has_coordinates: bool
    origin: FeatureFormat
    encoder: str | None
    weights_sha256: str | None
    precision: str | None
    fingerprint: str | None


def read_feature_metadata(path: Path) -> FeatureMetadata:
    """Read the metadata of a feature file; for HDF5 without reading the features."""
    stored = read_pt(path, metadata_only=True) if path.suffix == ".pt" else read_hdf5(path, metadata_only=True)
    if stored.features.ndim < 2 or not stored.features.shape[-2]:
        raise FeatureStoreError(
            f"{path} has no tiles: the shape of its features is {stored.features.shape}.", hint=_REDO_HINT
        )
    return FeatureMetadata(
        size=int(stored.features.shape[-1]),
        has_attention=stored.attention is not None,
        has_coordinates=stored.coords is not None and stored.has_pixel_coords,
        origin=stored.origin,
        encoder=stored.text_attribute("extractor" if stored.origin == "STAMP" else "encoder"),
        weights_sha256=stored.text_attribute("weights_sha256"),
        precision=stored.text_attribute("precision"),
        fingerprint=stored.text_attribute(FINGERPRINT_ATTRIBUTE),
    )


def read_features(path: Path) -> SlideFeatures:
    """Read the feature file of a slide, written by tapfm or another tool."""
    stored = read_pt(path) if path.suffix == ".pt" else read_hdf5(path)
    for name, array in (("features", stored.features), ("coords", stored.coords), ("attention", stored.attention)):
        if array is not None and array.dtype.kind not in "fiu":
            raise FeatureStoreError(
                f"{path}: `{name}` has the dtype {array.dtype}, which is not numeric.", hint=_REDO_HINT
            )
    features, coords, attention = _squeeze_batch(stored.features), stored.coords, stored.attention
    if coords is not None:
        coords = _squeeze_batch(coords) if coords.size else np.empty((0, 2), np.int64)
    with np.errstate(over="ignore"):  # values beyond float32 become infinite, which raises an error below
        features = features.astype(np.float32, copy=False)
    _check_arrays(str(path), features, coords, attention)
    return SlideFeatures(
        slide_id=stored.text_attribute("name") or path.stem,
        features=features,
        attention=None if attention is None else attention.astype(np.float32, copy=False),
        positions=_to_pixel_positions(coords) if coords is not None and stored.has_pixel_coords else None,
        side_px0=stored.side_px0,
        encoder=stored.text_attribute("extractor" if stored.origin == "STAMP" else "encoder"),
        fingerprint=stored.text_attribute(FINGERPRINT_ATTRIBUTE),
        origin=stored.origin,
    )


class StoredArrays(NamedTuple):
    """The contents of a feature file, unconverted."""

    origin: FeatureFormat
    features: NDArray[Any]
    coords: NDArray[Any] | None = None
    attention: NDArray[Any] | None = None
    attributes: Mapping[str, Any] = {}
    side_px0: int | None = None

    def text_attribute(self, name: str) -> str | None:
        """Return an attribute as text, or None."""
        return _decode_text(self.attributes.get(name))

    @property
    def has_pixel_coords(self) -> bool:
        """Whether `coords` are in level-0 pixels."""
        return self.origin != "STAMP" or self.text_attribute("unit") == "px"


def read_hdf5(path: Path, *, metadata_only: bool = False) -> StoredArrays:
    """Read an HDF5 file and recognise its format; with `metadata_only` the arrays have their shapes but only zeros."""

    def array(dataset: h5py.Dataset) -> NDArray[Any]:
        # a broadcast zero takes no memory
        return np.broadcast_to(np.zeros((), dataset.dtype), dataset.shape) if metadata_only else np.asarray(dataset)

    try:
        with h5py.File(path, "r") as file:
            coords = array(file["coords"]) if "coords" in file else None
            side = file["coords"].attrs.get("patch_size_level0") if coords is not None else None
            side_px0 = None if side is None or is_stored_none(side) else int(side)
            if "features" in file:
                features, attributes = array(file["features"]), dict(file["features"].attrs)
                if FINGERPRINT_ATTRIBUTE in attributes:
                    attention = array(file["attention"]) if "attention" in file else None
                    return StoredArrays("tapfm", features, coords, attention, attributes, side_px0)
                described = attributes or (coords is not None and dict(file["coords"].attrs))
                origin: FeatureFormat = "TRIDENT" if described else "CLAM"
                return StoredArrays(origin, features, coords, attributes=attributes, side_px0=side_px0)
            if "feats" in file:
                return StoredArrays("STAMP", array(file["feats"]), coords, attributes=dict(file.attrs))
            datasets = ", ".join(file) or "nothing"
    except Exception as error:  # damaged files raise many kinds of errors
        raise FeatureStoreError(f"{path} cannot be read as HDF5 ({error}).", hint=_REDO_HINT) from error
    raise FeatureStoreError(
        f"{path} has no dataset `features` (or `feats`). It contains: {datasets}.",
        hint="Compute features from slides and their tiles: tapfm embed --help",
    )


def read_pt(path: Path, *, metadata_only: bool = False) -> StoredArrays:
    """Read a tensor from a .pt file without running code; with `metadata_only` it is memory-mapped, if possible."""
    import torch

    try:
        mapped = metadata_only and zipfile.is_zipfile(path)  # the old format of torch.save cannot be mapped
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped or None)
    except pickle.UnpicklingError as error:
        raise FeatureStoreError(
            f"{path} is damaged, or contains Python objects other than tensors. They could run code, so tapfm does not "
            "load it.",
            hint="TRIDENT writes NumPy arrays to .pt files: use its .h5 files. If you trust the file, convert it: "
            "torch.save(torch.from_numpy(torch.load(FILE, weights_only=False)), FILE)",
        ) from error
    except Exception as error:  # damaged files raise many kinds of errors
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise FeatureStoreError(f"{path} cannot be read as a tensor ({reason}).", hint=_REDO_HINT) from error
    if not isinstance(loaded, torch.Tensor):
        raise FeatureStoreError(
            f"{path} contains a {type(loaded).__name__}, not a tensor.",
            hint="Save only the features, as a (tiles, D) tensor.",
        )
    if metadata_only:
        return StoredArrays("pt", np.broadcast_to(np.float32(0), tuple(loaded.shape)))
    return StoredArrays("pt", loaded.detach().float().numpy())


def _check_arrays(
    where: str, features: NDArray[Any], coords: NDArray[Any] | None, attention: NDArray[Any] | None
) -> None:
    """Raise FeatureStoreError if shapes do not match or values are not finite."""
    if features.ndim != 2 or features.shape[1] == 0:
        raise FeatureStoreError(
            f"{where}: the shape of the features is {features.shape}, not (tiles, D).",
            hint="A feature file needs one row per tile. Slide-level features (one vector per slide) cannot be used.",
        )
    tiles = len(features)
    for name, array, shape in (("coords", coords, (tiles, 2)), ("attention", attention, (tiles,))):
        if array is not None and array.shape != shape:
            raise FeatureStoreError(
                f"{where}: the shape of `{name}` is {array.shape}, but there are features of {tiles:,} tiles.",
                hint=_REDO_HINT,
            )
    finite = np.isfinite(features).all(axis=1)
    if attention is not None:
        finite &= np.isfinite(attention)
    if not finite.all():
        raise FeatureStoreError(
            f"{where}: {tiles - finite.sum():,} of {tiles:,} tiles have NaN or infinite values.",
            hint=f"float16 may have overflowed; use bfloat16 or float32. {_REDO_HINT}",
        )


def _squeeze_batch(array: NDArray[Any]) -> NDArray[Any]:
    """Remove a leading batch dimension of size 1."""
    return array[0] if array.ndim == 3 and len(array) == 1 else array


def _to_pixel_positions(coords: NDArray[Any]) -> Positions | None:
    """Return coordinates as integers; None if they are not whole pixels, so that their unit is unknown."""
    with np.errstate(invalid="ignore"):
        pixels = coords.astype(np.int64)
    return pixels if np.array_equal(pixels, coords) else None


def _decode_text(value: Any) -> str | None:
    """Decode an attribute; None if it is missing or the text "None", which TRIDENT stores."""
    if value is None or is_stored_none(value):
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

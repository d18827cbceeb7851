"""Features of a slide's tiles, one file per slide: ours, which TRIDENT reads too, and those of TRIDENT, CLAM and STAMP.

tapfm    <slide>.h5           `features` (N, D) float32 and `coords` (N, 2) level-0 top left, laid out as TRIDENT's,
                              and `attention` (N,) float32: the raw attention r of eq. 1
TRIDENT  <slide>.h5           `features` (N, D), at times (1, N, D); `coords`; each says what it is in its attributes
CLAM     h5_files/<slide>.h5  the same without attributes; pt_files/<slide>.pt holds the features alone, as a tensor
STAMP    <slide>.h5           `feats` (N, D) float16; `coords` in microns, which are no positions without a scale

Only our own files have the raw attention, so only they serve an aggregator that uses it.
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
from tapfm.tiles.store import TileSet, is_none, own_attributes, trident_attributes

FeatureFormat = Literal["tapfm", "TRIDENT", "CLAM", "STAMP", "pt"]

# Version of the features. Increase it when the same tiles give other features (readers, resizing, normalisation,
# encoders); slides embedded by an older version are then embedded again. tests/versions/ fails when the output changes
# and this number does not.
FEATURES_VERSION = 1

FINGERPRINT = "tapfm_fingerprint"  # the attribute that tells our files
_AGAIN = "Make it again: tapfm embed"


@dataclass(frozen=True)
class FeatureSet:
    """What an encoder said of a slide's tiles. What another tool's file does not say is None."""

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


def feature_file(folder: Path, slide_id: str) -> Path | None:
    """Find a slide's file under the names that the tools give it."""
    names = (f"{slide_id}.h5", f"h5_files/{slide_id}.h5", f"pt_files/{slide_id}.pt", f"{slide_id}.pt")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def stored_fingerprint(path: Path) -> str | None:
    """Read the fingerprint of a finished file of ours, and none of its features."""
    try:
        with h5py.File(path, "r") as file:
            return _text(file["features"].attrs[FINGERPRINT])
    except Exception:  # missing, damaged, or another tool's
        return None


def write_features(path: Path, features: FeatureSet, tiles: TileSet, *, about: Mapping[str, str | int | float]) -> None:
    """Write a slide's file, whole or not at all; `about` says how the features were made.

    The positions are those of the features: some tiles may have been unreadable. Without any, all tiles were encoded.
    """
    positions = tiles.positions if features.positions is None else features.positions
    _refuse_unusable(f"Slide '{features.slide_id}'", features.features, positions, features.attention)
    own = {
        "name": features.slide_id,
        "savetodir": "features",
        "encoder": features.encoder or "None",
        FINGERPRINT: features.fingerprint or "None",
    }
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        _put(file, "features", features.features.astype(np.float32, copy=False), dict(about) | own)
        _put(file, "coords", positions.astype(np.int64, copy=False), _known_attributes(tiles))
        if features.attention is not None:
            _put(file, "attention", features.attention.astype(np.float32, copy=False), {})
    write_atomically(path, buffer.getvalue())


def _put(file: h5py.File, name: str, data: NDArray[Any], attributes: Mapping[str, Any]) -> None:
    """Add a dataset and its attributes."""
    dataset = file.create_dataset(name, data=data)
    for key, value in attributes.items():
        dataset.attrs[key] = value


def _known_attributes(tiles: TileSet) -> dict[str, Any]:
    """Describe the tiles as their own file does, less what another tool's file left open."""
    if tiles.target_mpp is not None and tiles.slide_mpp is not None and tiles.size_px0 is not None:
        return trident_attributes(tiles) | own_attributes(tiles)
    unknown: set[str] = set()
    if tiles.target_mpp is None:
        unknown |= {"level0_magnification", "target_magnification"}
    if tiles.size_px0 is None:
        unknown |= {"level0_width", "level0_height"}
    filled = replace(tiles, target_mpp=tiles.target_mpp or 1.0, size_px0=tiles.size_px0 or (0, 0))
    return {name: value for name, value in trident_attributes(filled).items() if name not in unknown}


class FeatureFacts(NamedTuple):
    """What a file says of its features, without them."""

    size: int
    has_attention: bool
    has_positions: bool
    origin: FeatureFormat
    encoder: str | None
    weights_sha256: str | None
    precision: str | None
    fingerprint: str | None


def read_feature_facts(path: Path) -> FeatureFacts:
    """Read what a file says of its features; of HDF5 not the features themselves."""
    stored = read_tensor(path, only_look=True) if path.suffix == ".pt" else read_hdf5(path, only_look=True)
    if stored.features.ndim < 2 or not stored.features.shape[-2]:
        raise FeatureStoreError(
            f"{path} has no tiles: its features have the shape {stored.features.shape}.", hint=_AGAIN
        )
    return FeatureFacts(
        size=int(stored.features.shape[-1]),
        has_attention=stored.attention is not None,
        has_positions=stored.coords is not None and stored.in_pixels,
        origin=stored.origin,
        encoder=stored.said("extractor" if stored.origin == "STAMP" else "encoder"),
        weights_sha256=stored.said("weights_sha256"),
        precision=stored.said("precision"),
        fingerprint=stored.said(FINGERPRINT),
    )


def read_features(path: Path) -> FeatureSet:
    """Read a slide's file, ours or another tool's."""
    stored = read_tensor(path) if path.suffix == ".pt" else read_hdf5(path)
    for name, array in (("features", stored.features), ("coords", stored.coords), ("attention", stored.attention)):
        if array is not None and array.dtype.kind not in "fiu":
            raise FeatureStoreError(f"{path}: `{name}` holds {array.dtype}, not numbers.", hint=_AGAIN)
    features, coords, attention = _without_batch(stored.features), stored.coords, stored.attention
    if coords is not None:
        coords = _without_batch(coords) if coords.size else np.empty((0, 2), np.int64)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as such
        features = features.astype(np.float32, copy=False)
    _refuse_unusable(str(path), features, coords, attention)
    return FeatureSet(
        slide_id=stored.said("name") or path.stem,
        features=features,
        attention=None if attention is None else attention.astype(np.float32, copy=False),
        positions=_whole_pixels(coords) if coords is not None and stored.in_pixels else None,
        side_px0=stored.side_px0,
        encoder=stored.said("extractor" if stored.origin == "STAMP" else "encoder"),
        fingerprint=stored.said(FINGERPRINT),
        origin=stored.origin,
    )


class StoredArrays(NamedTuple):
    """What a file holds, as it holds it."""

    origin: FeatureFormat
    features: NDArray[Any]
    coords: NDArray[Any] | None = None
    attention: NDArray[Any] | None = None
    attributes: Mapping[str, Any] = {}
    side_px0: int | None = None

    def said(self, name: str) -> str | None:
        """Read an attribute that is a text."""
        return _text(self.attributes.get(name))

    @property
    def in_pixels(self) -> bool:
        """Say whether `coords` are level-0 pixels."""
        return self.origin != "STAMP" or self.said("unit") == "px"


def read_hdf5(path: Path, *, only_look: bool = False) -> StoredArrays:
    """Read an HDF5 file, and tell whose it is; with `only_look` the arrays have their shapes and nothing in them."""

    def array(dataset: h5py.Dataset) -> NDArray[Any]:
        # one zero seen from everywhere takes no memory
        return np.broadcast_to(np.zeros((), dataset.dtype), dataset.shape) if only_look else np.asarray(dataset)

    try:
        with h5py.File(path, "r") as file:
            coords = array(file["coords"]) if "coords" in file else None
            side = file["coords"].attrs.get("patch_size_level0") if coords is not None else None
            side_px0 = None if side is None or is_none(side) else int(side)
            if "features" in file:
                features, attributes = array(file["features"]), dict(file["features"].attrs)
                if FINGERPRINT in attributes:
                    attention = array(file["attention"]) if "attention" in file else None
                    return StoredArrays("tapfm", features, coords, attention, attributes, side_px0)
                described = attributes or (coords is not None and dict(file["coords"].attrs))
                origin: FeatureFormat = "TRIDENT" if described else "CLAM"
                return StoredArrays(origin, features, coords, attributes=attributes, side_px0=side_px0)
            if "feats" in file:
                return StoredArrays("STAMP", array(file["feats"]), coords, attributes=dict(file.attrs))
            holds = ", ".join(file) or "nothing"
    except Exception as error:  # damage shows in many ways
        raise FeatureStoreError(f"{path} cannot be read as HDF5 ({error}).", hint=_AGAIN) from error
    raise FeatureStoreError(
        f"{path} has no dataset `features` (or `feats`), only: {holds}.",
        hint="Features are made from slides and their tiles: tapfm embed --help",
    )


def read_tensor(path: Path, *, only_look: bool = False) -> StoredArrays:
    """Read a .pt file; as a tensor, never as code. With `only_look` the numbers stay on disk, if they can."""
    import torch

    try:
        mapped = only_look and zipfile.is_zipfile(path)  # older files cannot be
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped or None)
    except pickle.UnpicklingError as error:
        raise FeatureStoreError(
            f"{path} is damaged, or holds Python objects besides tensors, which could run code and are not opened.",
            hint="TRIDENT puts NumPy arrays in .pt files: use its .h5 files, or save as a tensor what you trust: "
            "torch.save(torch.from_numpy(torch.load(FILE, weights_only=False)), FILE)",
        ) from error
    except Exception as error:  # damage shows in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise FeatureStoreError(f"{path} cannot be read as a tensor ({reason}).", hint=_AGAIN) from error
    if not isinstance(loaded, torch.Tensor):
        raise FeatureStoreError(
            f"{path} holds a {type(loaded).__name__}, not a tensor.", hint="Save the (tiles, D) features alone."
        )
    if only_look:
        return StoredArrays("pt", np.broadcast_to(np.float32(0), tuple(loaded.shape)))
    return StoredArrays("pt", loaded.detach().float().numpy())


def _refuse_unusable(
    where: str, features: NDArray[Any], coords: NDArray[Any] | None, attention: NDArray[Any] | None
) -> None:
    """Refuse arrays that do not fit together, and numbers that are none."""
    if features.ndim != 2 or features.shape[1] == 0:
        raise FeatureStoreError(
            f"{where}: the features have the shape {features.shape}, not (tiles, D).",
            hint="A file must hold one row for each tile; one vector for a whole slide is something else.",
        )
    tiles = len(features)
    for name, array, shape in (("coords", coords, (tiles, 2)), ("attention", attention, (tiles,))):
        if array is not None and array.shape != shape:
            raise FeatureStoreError(
                f"{where}: `{name}` has the shape {array.shape}, but {tiles:,} tiles have features.", hint=_AGAIN
            )
    finite = np.isfinite(features).all(axis=1)
    if attention is not None:
        finite &= np.isfinite(attention)
    if not finite.all():
        raise FeatureStoreError(
            f"{where}: {tiles - finite.sum():,} of {tiles:,} tiles have a NaN or an infinity.",
            hint=f"float16 overflows where bfloat16 and float32 do not. {_AGAIN}",
        )


def _without_batch(array: NDArray[Any]) -> NDArray[Any]:
    """Take a batch of one slide for the slide."""
    return array[0] if array.ndim == 3 and len(array) == 1 else array


def _whole_pixels(coords: NDArray[Any]) -> Positions | None:
    """Take whole numbers as pixels; others are in a unit nobody states."""
    with np.errstate(invalid="ignore"):
        pixels = coords.astype(np.int64)
    return pixels if np.array_equal(pixels, coords) else None


def _text(value: Any) -> str | None:
    """Read an attribute's text; nothing where it is absent, or None as TRIDENT stores it."""
    if value is None or is_none(value):
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

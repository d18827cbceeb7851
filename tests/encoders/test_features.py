"""Feature files: those of tapfm have the layout of TRIDENT; files of TRIDENT, CLAM and STAMP can be read."""

import subprocess
import sys
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch

from tapfm.encoders.features import SlideFeatures, find_feature_file, read_features, read_fingerprint, write_features
from tapfm.errors import FeatureStoreError
from tapfm.runtime.seeding import make_rng
from tapfm.tiles.store import TileSet, read_tiles

TILES = TileSet(
    slide_id="case-17",
    positions=np.array([[0, 448], [896, 448], [13, 27]]),
    side_px0=448,
    tile_px=224,
    target_mpp=0.5,
    slide_mpp=0.25,
    size_px0=(40_000, 30_000),
    fingerprint="of the tiles",
    summary={"tiles": 3},
)
TRIDENT_COORDS = {
    "patch_size": 224,
    "patch_size_level0": 448,
    "level0_magnification": 40,
    "target_magnification": 20,
    "overlap": 0,
    "name": "case-17",
    "savetodir": "patches",
    "level0_width": 40_000,
    "level0_height": 30_000,
}


def random_features(tiles=3, size=8):
    return make_rng(0, "features").normal(size=(tiles, size)).astype(np.float32)


def feature_set(**changes):
    features = SlideFeatures(
        slide_id="case-17",
        features=random_features(),
        attention=np.array([0.004, 0.001, 0.002], np.float32),
        positions=TILES.positions,
        encoder="kaiko-s16",
        fingerprint="f00",
    )
    return replace(features, **changes)


def write_file(path, features=None, tiles=TILES):
    write_features(
        path, features or feature_set(), tiles, attributes={"precision": "bfloat16", "batch": 64, "seconds": 1.5}
    )
    return path


def write_hdf5(path, datasets, *, file_attributes=None, **attributes):
    """Write a file like another tool, with attributes of the datasets or of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, data in datasets.items():
            file[name] = data
            file[name].attrs.update(attributes.get(name, {}))
        file.attrs.update(file_attributes or {})
    return path


def test_features_are_written_and_read(tmp_path):
    features = feature_set()
    again = read_features(write_file(tmp_path / "case-17.h5", features))
    for name in ("features", "attention", "positions"):
        np.testing.assert_array_equal(getattr(again, name), getattr(features, name))
        assert getattr(again, name).dtype == getattr(features, name).dtype
    for name in ("slide_id", "encoder", "fingerprint", "origin"):
        assert getattr(again, name) == getattr(features, name)
    assert len(again) == 3


def test_unknown_fields_are_read_as_none(tmp_path):
    bare = SlideFeatures("case-17", random_features())
    path = write_file(tmp_path / "a.h5", bare)
    again = read_features(path)
    assert (again.attention, again.encoder, again.fingerprint, read_fingerprint(path)) == (None, None, None, None)
    np.testing.assert_array_equal(again.positions, TILES.positions)


def test_tapfm_file_has_the_layout_of_trident(tmp_path):
    with h5py.File(write_file(tmp_path / "case-17.h5")) as file:
        assert set(file) == {"features", "coords", "attention"}
        assert (file["features"].dtype, file["features"].shape) == (np.float32, (3, 8))
        assert (file["coords"].dtype, file["coords"].shape) == (np.int64, (3, 2))
        assert (file["attention"].dtype, file["attention"].shape) == (np.float32, (3,))
        features, coords = dict(file["features"].attrs), dict(file["coords"].attrs)
    assert {name: features[name] for name in ("name", "encoder")} == {"name": "case-17", "encoder": "kaiko-s16"}
    assert "savetodir" in features
    assert {name: coords[name] for name in TRIDENT_COORDS} == TRIDENT_COORDS


def test_tapfm_file_contains_fingerprint_and_metadata(tmp_path):
    with h5py.File(write_file(tmp_path / "case-17.h5")) as file:
        attributes = dict(file["features"].attrs)
    assert attributes["tapfm_fingerprint"] == "f00"
    assert (attributes["precision"], attributes["batch"], attributes["seconds"]) == ("bfloat16", 64, 1.5)


def test_unreadable_tiles_are_not_in_the_file(tmp_path):
    without_one = feature_set(features=random_features(2), attention=np.array([0.1, 0.2], np.float32))
    tiles = replace(TILES, padded=np.array([False, True, True]))
    path = write_file(tmp_path / "a.h5", without_one, tiles.select(np.array([0, 2])))
    np.testing.assert_array_equal(read_features(path).positions, [[0, 448], [13, 27]])
    with h5py.File(path) as file:
        assert np.asarray(file["padded"]).tolist() == [False, True]
    with h5py.File(write_file(tmp_path / "b.h5")) as file:
        assert "padded" not in file


@pytest.mark.parametrize(
    "unknown",
    [
        {},
        {"slide_mpp": None},
        {"slide_mpp": None, "size_px0": None},
        {"slide_mpp": None, "target_mpp": None},
        {"slide_mpp": None, "target_mpp": None, "size_px0": None},
    ],
    ids=lambda unknown: "no " + " ".join(unknown) if unknown else "all known",
)
def test_tiles_can_be_read_from_a_feature_file(tmp_path, unknown):
    """Tiles from files of TRIDENT or CLAM have unknown fields."""
    tiles = replace(TILES, **unknown)
    again = read_tiles(write_file(tmp_path / "a.h5", tiles=tiles))
    for name in ("slide_id", "side_px0", "tile_px", "target_mpp", "slide_mpp", "size_px0"):
        assert getattr(again, name) == getattr(tiles, name)


def test_file_is_deterministic(tmp_path):
    assert write_file(tmp_path / "a" / "x.h5").read_bytes() == write_file(tmp_path / "b" / "x.h5").read_bytes()


def test_fingerprint_is_read_only_from_complete_tapfm_files(tmp_path):
    complete = write_file(tmp_path / "a.h5")
    assert read_fingerprint(complete) == "f00"
    assert read_fingerprint(tmp_path / "none.h5") is None
    assert read_fingerprint(write_hdf5(tmp_path / "clam.h5", {"features": random_features()})) is None
    truncated = tmp_path / "cut.h5"
    truncated.write_bytes(complete.read_bytes()[:-200])
    assert read_fingerprint(truncated) is None


def test_trident_file(tmp_path):
    path = write_hdf5(
        tmp_path / "case-17.h5",
        {"features": random_features(), "coords": TILES.positions},
        features={"name": "case-17", "savetodir": "None", "encoder": "uni_v1"},
        coords=TRIDENT_COORDS | {"level0_width": "None"},
    )
    read = read_features(path)
    np.testing.assert_array_equal(read.features, random_features())
    np.testing.assert_array_equal(read.positions, TILES.positions)
    assert (read.origin, read.slide_id, read.encoder) == ("TRIDENT", "case-17", "uni_v1")
    assert (read.attention, read.fingerprint) == (None, None)


def test_text_none_of_trident_is_read_as_none(tmp_path):
    path = write_hdf5(
        tmp_path / "case-9.h5", {"features": random_features()}, features={"name": "None", "encoder": b"None"}
    )
    read = read_features(path)
    assert (read.origin, read.slide_id, read.encoder, read.positions) == ("TRIDENT", "case-9", None, None)


@pytest.mark.parametrize("tiles", [1, 3])
def test_batch_dimension_is_removed(tmp_path, tiles):
    path = write_hdf5(
        tmp_path / "a.h5", {"features": random_features(tiles)[None], "coords": TILES.positions[None, :tiles]}
    )
    read = read_features(path)
    np.testing.assert_array_equal(read.features, random_features(tiles))
    np.testing.assert_array_equal(read.positions, TILES.positions[:tiles])


@pytest.mark.parametrize("coords", [np.empty((0, 2), np.int64), np.empty(0)], ids=["(0, 2)", "(0,)"])
def test_file_without_tiles(tmp_path, coords):
    read = read_features(
        write_hdf5(
            tmp_path / "a.h5", {"features": np.empty((0, 8), np.float32), "coords": coords}, coords=TRIDENT_COORDS
        )
    )
    assert (len(read), read.features.shape, read.positions.shape) == (0, (0, 8), (0, 2))


def test_clam_files(tmp_path):
    coords = TILES.positions.astype(np.int32)
    read = read_features(
        write_hdf5(tmp_path / "h5_files" / "case-17.h5", {"features": random_features(), "coords": coords})
    )
    assert (read.origin, read.slide_id, read.encoder, read.positions.dtype) == ("CLAM", "case-17", None, np.int64)
    np.testing.assert_array_equal(read.features, random_features())

    (tmp_path / "pt_files").mkdir()
    torch.save(torch.from_numpy(random_features()), tmp_path / "pt_files" / "case-17.pt")
    read = read_features(tmp_path / "pt_files" / "case-17.pt")
    assert (read.origin, read.slide_id, read.positions, read.attention) == ("pt", "case-17", None, None)
    np.testing.assert_array_equal(read.features, random_features())


@pytest.mark.parametrize(("unit", "positions"), [("um", None), (None, None), ("px", TILES.positions)])
def test_stamp_file(tmp_path, unit, positions):
    about = {"stamp_version": "99.0.0", "extractor": "virchow2", "tile_size_um": 256.0, "feat_type": "tile"}
    path = write_hdf5(
        tmp_path / "case-17.h5",
        {"feats": random_features().astype(np.float16), "coords": TILES.positions.astype(np.float32)},
        file_attributes=about | ({"unit": unit} if unit else {}),
    )
    read = read_features(path)
    assert (read.origin, read.slide_id, read.encoder, read.attention) == ("STAMP", "case-17", "virchow2", None)
    assert read.features.dtype == np.float32
    np.testing.assert_allclose(read.features, random_features(), rtol=1e-3)
    np.testing.assert_array_equal(read.positions, positions)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_features_are_converted_to_float32(tmp_path, dtype):
    stored = random_features().astype(dtype)
    read = read_features(write_hdf5(tmp_path / "a.h5", {"features": stored}))
    assert read.features.dtype == np.float32
    np.testing.assert_array_equal(read.features, stored.astype(np.float32))


def test_bfloat16_tensor_is_converted_to_float32(tmp_path):
    stored = torch.from_numpy(random_features()).bfloat16()
    torch.save(stored, tmp_path / "a.pt")
    np.testing.assert_array_equal(read_features(tmp_path / "a.pt").features, stored.float().numpy())


def test_attention_of_another_tool_is_ignored(tmp_path):
    path = write_hdf5(tmp_path / "a.h5", {"features": random_features(), "attention": np.ones(3)})
    assert read_features(path).attention is None


def test_coords_that_are_not_integers_are_not_positions(tmp_path):
    path = write_hdf5(
        tmp_path / "a.h5", {"features": random_features(), "coords": np.array([[0, 0.5], [1, np.nan], [2, np.inf]])}
    )
    assert read_features(path).positions is None


def random_features_with(value):
    features = random_features().astype(np.float64)
    features[0, 3] = features[2, 1] = features[2, 2] = value
    return features


INVALID_FILES = {
    "no features": ({"coords": TILES.positions}, "has no dataset `features` .* contains: coords"),
    "nothing": ({}, "contains: nothing"),
    "slide-level vector": ({"features": random_features()[0]}, r"shape .* is \(8,\), not \(tiles, D\)"),
    "two slides": ({"features": np.zeros((2, 3, 8))}, r"shape .* is \(2, 3, 8\)"),
    "no columns": ({"features": np.zeros((3, 0))}, r"shape .* is \(3, 0\)"),
    "texts": ({"features": [b"a", b"b"]}, r"`features` has the dtype .* not numeric"),
    "fewer coords": (
        {"features": random_features(), "coords": TILES.positions[:2]},
        r"`coords` .* \(2, 2\), .* 3 tiles",
    ),
    "empty coords": ({"features": random_features(), "coords": np.empty((0, 2))}, r"`coords` .* \(0, 2\), .* 3 tiles"),
    "microns of other tiles": (
        {"feats": random_features(), "coords": np.zeros((4, 2))},
        r"`coords` .* \(4, 2\), .* 3 tiles",
    ),
    "NaN": ({"features": random_features_with(np.nan)}, "2 of 3 tiles have NaN or infinite values"),
    "infinite": ({"features": random_features_with(-np.inf)}, "2 of 3 tiles"),
    "beyond float32": ({"features": random_features_with(1e300)}, "2 of 3 tiles"),
}


@pytest.mark.parametrize(("datasets", "message"), INVALID_FILES.values(), ids=INVALID_FILES)
def test_invalid_file_is_an_error_that_names_the_file(tmp_path, datasets, message):
    with pytest.raises(FeatureStoreError, match=message) as raised:
        read_features(write_hdf5(tmp_path / "case-17.h5", datasets))
    assert str(tmp_path / "case-17.h5") in raised.value.message
    assert raised.value.hint


@pytest.mark.parametrize(
    ("attention", "message"),
    [(np.ones(2), r"`attention` .* \(2,\), .* 3 tiles"), (np.array([1, np.nan, 1]), "1 of 3 tiles")],
    ids=["of other tiles", "NaN"],
)
def test_invalid_attention_is_an_error_when_read_and_when_written(tmp_path, attention, message):
    path = write_hdf5(
        tmp_path / "a.h5",
        {"features": random_features(), "attention": attention},
        features={"tapfm_fingerprint": "f00"},
    )
    with pytest.raises(FeatureStoreError, match=message):
        read_features(path)
    with pytest.raises(FeatureStoreError, match=f"Slide 'case-17': .*{message}"):
        write_file(tmp_path / "b.h5", feature_set(attention=attention))
    assert not (tmp_path / "b.h5").exists()


def test_writing_features_of_other_tiles_is_an_error(tmp_path):
    with pytest.raises(FeatureStoreError, match=r"`coords` .* \(3, 2\), .* 2 tiles"):
        write_file(tmp_path / "a.h5", SlideFeatures("case-17", random_features(2)))


@pytest.mark.parametrize("name", ["a.h5", "a.pt"])
def test_damaged_and_missing_files_are_an_error(tmp_path, name):
    path = tmp_path / name
    with pytest.raises(FeatureStoreError, match="cannot be read as"):
        read_features(path)
    if name == "a.pt":
        torch.save(torch.zeros(100, 100), path)
    else:
        write_file(path)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(FeatureStoreError, match="cannot be read as"):
        read_features(path)


def test_pickled_objects_are_not_loaded(tmp_path):
    """TRIDENT's .pt files are pickled NumPy arrays."""
    torch.save(random_features(), tmp_path / "a.pt")
    with pytest.raises(FeatureStoreError, match="could run code") as raised:
        read_features(tmp_path / "a.pt")
    assert "torch.from_numpy" in raised.value.hint


def test_pt_file_with_a_dictionary_is_an_error(tmp_path):
    torch.save({"features": torch.zeros(3, 8)}, tmp_path / "a.pt")
    with pytest.raises(FeatureStoreError, match="contains a dict, not a tensor"):
        read_features(tmp_path / "a.pt")


def test_feature_file_is_found_under_the_names_of_all_tools(tmp_path):
    assert find_feature_file(tmp_path, "case.17") is None
    for name in ("case.17.pt", "pt_files/case.17.pt", "h5_files/case.17.h5", "case.17.h5"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        assert find_feature_file(tmp_path, "case.17") == tmp_path / name


def test_reading_hdf5_does_not_import_torch(tmp_path):
    path = write_file(tmp_path / "a.h5")
    code = (
        "import sys; from pathlib import Path; from tapfm.encoders.features import read_features; "
        "assert len(read_features(Path(sys.argv[1]))) == 3; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)

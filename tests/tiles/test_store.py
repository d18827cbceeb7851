"""Tile files: TRIDENT and CLAM can read those of tapfm, and tapfm can read theirs."""

from dataclasses import replace

import h5py
import numpy as np
import openslide
import pytest
from slide_files import section, write_slide

from tapfm.errors import TileStoreError
from tapfm.slides.opening import open_slide
from tapfm.slides.region_reading import _resize as resize
from tapfm.slides.scale import resolve_scale
from tapfm.tiles.grid import TileSpec
from tapfm.tiles.store import TileSet, read_tiles, tile_file_path, write_tiles
from tapfm.tiles.tiling import tile_slide


def tile_set(mpp=0.25, spec=None, positions=None):
    spec = spec or TileSpec()
    return TileSet(
        slide_id="case-17",
        positions=np.array([[0, 448], [896, 448], [13, 27]]) if positions is None else positions,
        side_px0=spec.side_px0(mpp),
        tile_px=spec.tile_px,
        target_mpp=spec.mpp,
        slide_mpp=mpp,
        overlap_px=spec.overlap_px,
        size_px0=(40_000, 30_000),
        fingerprint="f00",
        summary={"tiles": 3},
    )


def test_content_digest_depends_on_the_tiles_only():
    tiles = tile_set()
    changes = {
        "positions": tiles.positions + 1,
        "side_px0": tiles.side_px0 + 1,
        "tile_px": tiles.tile_px + 1,
        "size_px0": (40_000, 30_001),
    }
    digests = {replace(tiles, **{name: value}).content_digest for name, value in changes.items()}
    assert len(digests | {tiles.content_digest}) == 5
    assert replace(tiles, fingerprint="other", summary={}, slide_mpp=None).content_digest == tiles.content_digest


@pytest.mark.parametrize("layout", ["trident", "clam"])
def test_padded_tiles_are_marked_beside_the_coordinates(tmp_path, layout):
    tiles = tile_set()
    with h5py.File(write_tiles(tmp_path / "a", tiles, layout)) as file:
        assert list(file) == ["coords"]
        attributes = {name: np.asarray(value).tolist() for name, value in file["coords"].attrs.items()}
    padded = np.array([False, True, True])
    path = write_tiles(tmp_path / "b", replace(tiles, padded=padded), layout)
    with h5py.File(path) as file:  # what TRIDENT and CLAM read is the same
        assert {name: np.asarray(value).tolist() for name, value in file["coords"].attrs.items()} == attributes
        np.testing.assert_array_equal(file["coords"], tiles.positions)
        assert list(file) == ["coords", "padded"]
        assert file["padded"].dtype == bool
        assert dict(file["padded"].attrs) == {}
    again = read_tiles(path)
    assert again.padded.tolist() == padded.tolist()
    assert again.content_digest == tiles.content_digest
    selected = again.select(np.array([2, 0]))
    assert selected.positions.tolist() == tiles.positions[[2, 0]].tolist()
    assert selected.padded.tolist() == [True, False]
    assert read_tiles(tile_file_path(tmp_path / "a", "case-17", layout)).select(np.array([1])).padded is None
    with h5py.File(path, "r+") as file:
        del file["padded"]
        file["padded"] = [True]
    with pytest.raises(TileStoreError, match=r"`padded` has shape \(1,\) instead of \(3,\)"):
        read_tiles(path)


def trident_side_px0(attributes):
    """Compute the side from the attributes of `coords` as TRIDENT does."""
    source_um, target_um = 10 / attributes["level0_magnification"], 10 / attributes["target_magnification"]
    return round(attributes["patch_size"] * (target_um / source_um))


@pytest.mark.parametrize("mpp", [0.5, 0.25, 0.23, 0.2645, 0.33])
@pytest.mark.parametrize("layout", ["trident", "clam"])
def test_read_tiles_returns_what_was_written(tmp_path, layout, mpp):
    tiles = tile_set(mpp, TileSpec(overlap_px=32))
    again = read_tiles(write_tiles(tmp_path, tiles, layout))
    np.testing.assert_array_equal(again.positions, tiles.positions)
    assert {name: getattr(again, name) for name in vars(tiles) if name != "positions"} == {
        name: getattr(tiles, name) for name in vars(tiles) if name != "positions"
    }
    assert again.achieved_mpp == pytest.approx(0.5, abs=0.5 * mpp / 224 + 1e-9)


@pytest.mark.parametrize(("mpp", "objective"), [(0.5, 20), (0.25, 40), (0.2645, 40)])
@pytest.mark.parametrize("layout", ["trident", "clam"])
def test_trident_and_clam_read_the_same_pixels(tmp_path, layout, mpp, objective):
    path = write_slide(tmp_path / "case-17.svs", section(1800, 1500), mpp=mpp, objective=objective)
    slide = open_slide(path)
    tiled = tile_slide(slide, resolve_scale(slide.metadata), TileSpec())
    tiles = tile_set(mpp, positions=tiled.kept)
    reference = openslide.OpenSlide(path)
    with h5py.File(write_tiles(tmp_path, tiles, layout)) as file:
        coords, attributes = np.asarray(file["coords"]), dict(file["coords"].attrs)
    for x, y in coords[:4].tolist():
        if layout == "trident":
            side_px0 = trident_side_px0(attributes)
            assert side_px0 == attributes["patch_size_level0"]
            target_px = attributes["patch_size"]
            region = reference.read_region((x, y), 0, (side_px0, side_px0))
        else:
            patch_px, level = int(attributes["patch_size"]), int(attributes["patch_level"])
            region = reference.read_region((x, y), level, (patch_px, patch_px))
            target_px = 224  # CLAM's --target_patch_size
        pixels = np.asarray(region.convert("RGB"))
        tile = resize(pixels, (0, 0, pixels.shape[1], pixels.shape[0]), target_px, target_px)
        np.testing.assert_array_equal(tile, slide.read(x, y, tiled.side_px0, 224))


def test_patch_size_at_40x_differs_between_layouts(tmp_path):
    sizes = {}
    for layout in ("trident", "clam"):
        with h5py.File(write_tiles(tmp_path, tile_set(0.25), layout)) as file:
            sizes[layout] = int(file["coords"].attrs["patch_size"])
    assert sizes == {"trident": 224, "clam": 448}


def test_trident_layout(tmp_path):
    path = write_tiles(tmp_path, tile_set(0.25), "trident")
    assert path == tmp_path / "patches" / "case-17_patches.h5"
    with h5py.File(path) as file:
        coords = file["coords"]
        assert (coords.dtype, coords.shape, coords.chunks, coords.compression) == (np.int64, (3, 2), None, None)
        assert {name: coords.attrs[name] for name in TRIDENT} == TRIDENT
        assert all(np.issubdtype(type(coords.attrs[n]), np.integer) for n in ("level0_magnification", "patch_size"))


TRIDENT = {
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


def test_clam_layout(tmp_path):
    path = write_tiles(tmp_path, tile_set(0.25), "clam")
    assert path == tmp_path / "patches" / "case-17.h5"
    with h5py.File(path) as file:
        attributes = file["coords"].attrs
        assert (attributes["patch_size"], attributes["patch_level"], attributes["name"]) == (448, 0, "case-17")
        for name, value in (
            ("downsample", [1, 1]),
            ("downsampled_level_dim", [40_000, 30_000]),
            ("level_dim", [40_000, 30_000]),
        ):
            assert attributes[name].tolist() == value


def write_tile_file(path, coords, attributes):
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("coords", data=coords)
        for name, value in attributes.items():
            dataset.attrs[name] = value
    return path


def test_read_trident_file(tmp_path):
    attributes = TRIDENT | {"patch_size": 512, "patch_size_level0": 1024, "overlap": 64, "savetodir": "None"}
    tiles = read_tiles(write_tile_file(tmp_path / "x_patches.h5", np.array([[0, 1024]], np.int64), attributes))
    assert (tiles.slide_id, tiles.side_px0, tiles.tile_px, tiles.target_mpp) == ("case-17", 1024, 512, 0.5)
    assert (tiles.overlap_px, tiles.size_px0, tiles.fingerprint) == (64, (40_000, 30_000), None)
    empty = read_tiles(
        write_tile_file(tmp_path / "e_patches.h5", np.empty((0, 2)), attributes | {"level0_width": "None"})
    )
    assert (len(empty), empty.size_px0) == (0, None)


@pytest.mark.parametrize(
    ("attributes", "side_px0", "tile_px"),
    [
        ({"patch_size": 256, "patch_level": 0, "downsample": [1.0, 1.0]}, 256, 256),
        ({"patch_size": 256, "patch_level": 1, "downsample": [4.0, 4.0]}, 1024, 256),
        ({"patch_size": 512, "patch_level": 0, "downsample": [1.0, 1.0], "custom_downsample": 2}, 512, 256),
    ],
)
def test_read_clam_file(tmp_path, attributes, side_px0, tile_px):
    tiles = read_tiles(
        write_tile_file(tmp_path / "case-9.h5", np.array([[4, 8]]), attributes | {"level_dim": [9000, 8000]})
    )
    assert (tiles.slide_id, tiles.side_px0, tiles.tile_px, tiles.target_mpp) == ("case-9", side_px0, tile_px, None)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [({}, "does not contain the size"), ({"patch_size": 256, "patch_level": 2}, "no attribute `downsample`")],
)
def test_file_without_tile_size_is_rejected(tmp_path, attributes, message):
    with pytest.raises(TileStoreError, match=message):
        read_tiles(write_tile_file(tmp_path / "a.h5", np.array([[0, 0]]), attributes))


def test_files_without_tile_positions_are_rejected(tmp_path):
    (tmp_path / "a.h5").write_bytes(b"none")
    with pytest.raises(TileStoreError, match="cannot be read as HDF5"):
        read_tiles(tmp_path / "a.h5")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["features"] = np.zeros((3, 4))
    with pytest.raises(TileStoreError, match="datasets: features"):
        read_tiles(tmp_path / "b.h5")


def test_same_tiles_give_same_bytes(tmp_path):
    first = write_tiles(tmp_path / "a", tile_set(), "trident").read_bytes()
    assert first == write_tiles(tmp_path / "b", tile_set(), "trident").read_bytes()

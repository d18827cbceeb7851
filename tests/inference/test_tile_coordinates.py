"""Coordinates of tiles on the slide, in units of the tile side: from the tiles of a slide, and from stored features."""

from itertools import repeat

import h5py
import numpy as np
import pytest
import torch
from training_slides import TILES_PER_ROW, make_bags, make_learner, write_slides

from tapfm.encoders.features import SlideFeatures, read_feature_metadata, write_features
from tapfm.inference.bags import BagRequest, FeatureBags
from tapfm.inference.bags import _compute_coordinates as tile_coordinates
from tapfm.inference.predictor import Predictor
from tapfm.tiles.store import TileSet

POSITIONS = np.array([[448, 0], [0, 448], [896, 1344]])


def visit(tiles, purpose="train"):
    return BagRequest(purpose, "s00", tiles, (0, 1, "s00"))


def feature_bags(path):
    return FeatureBags({"s00": path}, device=torch.device("cpu"), prefetch_bytes=2**20)


def test_bag_of_pixels_has_coordinates(tmp_path):
    bags, model = make_bags(write_slides(tmp_path, 1)), make_learner().model
    for purpose in ("train", "inference"):
        plan = visit(6, purpose)
        bags.start(repeat(plan, 1))
        bag = bags.read(plan) if purpose == "train" else Predictor.for_training(model).encode_slide(bags, plan)
        bags.close()
        grid = np.stack([bag.rows % TILES_PER_ROW, bag.rows // TILES_PER_ROW], 1)
        assert bag.coordinates.tolist() == grid.tolist()
        assert len(set(bag.rows.tolist())) == 6


def test_bag_of_features_has_coordinates_of_the_sampled_tiles(tmp_path):
    tiles = TileSet("s00", POSITIONS, 448, 224, 0.5, 0.25, 0, (4000, 4000), fingerprint="t", summary={})
    features = SlideFeatures("s00", np.eye(3, 8, dtype=np.float32), np.zeros(3, np.float32), POSITIONS, fingerprint="f")
    write_features(tmp_path / "s00.h5", features, tiles, attributes={})
    assert read_feature_metadata(tmp_path / "s00.h5").has_coordinates
    for _ in range(2):  # read from the file, then from the cache
        bag = feature_bags(tmp_path / "s00.h5").read(visit(2))
        assert bag.coordinates.tolist() == (POSITIONS[bag.rows] / 448).tolist()
        assert bag.content.z_KD.argmax(1).tolist() == bag.rows.tolist()


def test_tile_side_of_clam_files_is_inferred_from_positions(tmp_path):
    with h5py.File(tmp_path / "s00.h5", "w") as file:
        file["features"], file["coords"] = np.ones((3, 8), np.float32), POSITIONS
    bag = feature_bags(tmp_path / "s00.h5").read(visit(None))
    assert sorted(bag.coordinates.tolist()) == [[0, 1], [1, 0], [2, 3]]


@pytest.mark.parametrize("tool", ["STAMP", "pt"])
def test_files_without_positions_have_no_coordinates(tmp_path, tool):
    path = tmp_path / ("s00.h5" if tool == "STAMP" else "s00.pt")
    if tool == "STAMP":
        with h5py.File(path, "w") as file:
            file["feats"], file["coords"] = np.ones((3, 8), np.float16), POSITIONS / 7
    else:
        torch.save(torch.ones(3, 8), path)
    assert not read_feature_metadata(path).has_coordinates
    assert feature_bags(path).read(visit(None)).coordinates is None


def test_single_tile_of_unknown_side_has_coordinates():
    assert tile_coordinates(POSITIONS[:1], None).isfinite().all()
    assert tile_coordinates(POSITIONS[:1], 448).tolist() == [[1, 0]]

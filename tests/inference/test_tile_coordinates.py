"""Coordinates of tiles on the slide, in tile sides: from the tiles of a slide, and from stored features."""

from itertools import repeat

import h5py
import numpy as np
import pytest
import torch
from training_slides import ACROSS, make_bags, make_learner, write_slides

from tapfm.encoders.features import FeatureSet, read_feature_metadata, write_features
from tapfm.inference.bags import BagRequest, FeatureBags
from tapfm.inference.bags import _tile_coordinates as tile_coordinates
from tapfm.inference.predictor import Predictor
from tapfm.tiles.store import TileSet

POSITIONS = np.array([[448, 0], [0, 448], [896, 1344]])


def visit(tiles, purpose="train"):
    return BagRequest(purpose, "s00", tiles, (0, 1, "s00"))


def feature_bags(path):
    return FeatureBags({"s00": path}, device=torch.device("cpu"), prefetch_bytes=2**20)


def test_tiles_that_are_read_come_with_their_coordinates(tmp_path):
    bags, model = make_bags(write_slides(tmp_path, 1)), make_learner().model
    for purpose in ("train", "inference"):
        plan = visit(6, purpose)
        bags.start(repeat(plan, 1))
        bag = bags.read(plan) if purpose == "train" else Predictor.for_training(model).encode_slide(bags, plan)
        bags.close()
        grid = np.stack([bag.rows % ACROSS, bag.rows // ACROSS], 1)
        assert bag.coordinates.tolist() == grid.tolist()
        assert len(set(bag.rows.tolist())) == 6


def test_stored_features_come_with_their_coordinates_and_a_draw_keeps_them_together(tmp_path):
    tiles = TileSet("s00", POSITIONS, 448, 224, 0.5, 0.25, 0, (4000, 4000), fingerprint="t", summary={})
    features = FeatureSet("s00", np.eye(3, 8, dtype=np.float32), np.zeros(3, np.float32), POSITIONS, fingerprint="f")
    write_features(tmp_path / "s00.h5", features, tiles, about={})
    assert read_feature_metadata(tmp_path / "s00.h5").has_positions
    for _ in range(2):  # read, and kept
        bag = feature_bags(tmp_path / "s00.h5").read(visit(2))
        assert bag.coordinates.tolist() == (POSITIONS[bag.rows] / 448).tolist()
        assert bag.content.z_KD.argmax(1).tolist() == bag.rows.tolist()


def test_clams_files_do_not_say_how_large_a_tile_is_but_tiles_lie_side_by_side(tmp_path):
    with h5py.File(tmp_path / "s00.h5", "w") as file:
        file["features"], file["coords"] = np.ones((3, 8), np.float32), POSITIONS
    bag = feature_bags(tmp_path / "s00.h5").read(visit(None))
    assert sorted(bag.coordinates.tolist()) == [[0, 1], [1, 0], [2, 3]]


@pytest.mark.parametrize("tool", ["STAMP", "pt"])
def test_files_without_positions_give_none(tmp_path, tool):
    path = tmp_path / ("s00.h5" if tool == "STAMP" else "s00.pt")
    if tool == "STAMP":
        with h5py.File(path, "w") as file:
            file["feats"], file["coords"] = np.ones((3, 8), np.float16), POSITIONS / 7
    else:
        torch.save(torch.ones(3, 8), path)
    assert not read_feature_metadata(path).has_positions
    assert feature_bags(path).read(visit(None)).coordinates is None


def test_one_tile_alone_has_a_place_whatever_its_side():
    assert tile_coordinates(POSITIONS[:1], None).isfinite().all()
    assert tile_coordinates(POSITIONS[:1], 448).tolist() == [[1, 0]]

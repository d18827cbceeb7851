"""The truth beside painted slides: read back as it was written, and right about every tile."""

import json

import cv2
import numpy as np
import pytest

from tapfm.errors import InputError
from tapfm.slides.annotations import _iterate_polygons as iterate_polygons
from tapfm.slides.annotations import _rasterise as rasterise
from tapfm.slides.slide import Box
from tapfm.synthetic.section import Compartment
from tapfm.synthetic.truth import (
    SlideTruth,
    encode_tile_table,
    encode_truth_geojson,
    encode_truth_image,
    read_truth,
    tile_rows,
    truth_metadata,
)


@pytest.fixture
def truth():
    """Make a slide of 448 x 448 um at 0.25 um per pixel: tissue on its left half, a focus in the second quarter."""
    compartments = np.zeros((448, 448), np.uint8)
    compartments[:, :224] = Compartment.STROMA
    compartments[:, 112:224] = Compartment.EPITHELIUM
    focus = np.zeros_like(compartments)
    focus[:112, 112:224] = 1
    focus[112:168, 112:224] = 2
    return SlideTruth(compartments, focus, ("FGFR3", "large"), 1792, 1792, 0.25)


def write(folder, truth, slide_id="S001"):
    (folder / f"{slide_id}.png").write_bytes(encode_truth_image(truth))
    (folder / f"{slide_id}.json").write_text(json.dumps(truth_metadata(truth)))


def test_truth_is_read_back_as_it_was_written(tmp_path, truth):
    write(tmp_path, truth)
    read = read_truth(tmp_path, "S001")
    np.testing.assert_array_equal(read.compartments, truth.compartments)
    np.testing.assert_array_equal(read.focus, truth.focus)
    assert (read.foci, read.width_px0, read.height_px0, read.mpp) == (truth.foci, 1792, 1792, 0.25)


def test_what_a_tile_carries_is_the_part_of_it_that_the_focus_covers(truth):
    positions = np.array([[448, 0], [448, 448], [0, 0], [672, 0], [448, 224]])
    assert truth.signal("FGFR3", positions, 448) == pytest.approx([1, 0, 0, 0.5, 0.5])
    assert truth.signal("large", positions, 448) == pytest.approx([0, 0.5, 0, 0, 0.5])
    assert truth.signal("EGFR", positions, 448).tolist() == [0, 0, 0, 0, 0]


def test_the_table_lists_the_tiles_of_tapfm_tile(truth):
    rows = tile_rows("S001", truth, ["FGFR3"])
    assert [row[:4] for row in rows[:2]] == [["S001", "0", "0", "448"], ["S001", "448", "0", "448"]]
    assert len(rows) == 16
    assert [row[4] for row in rows] == ["1.000", "1.000", "0.000", "0.000"] * 4
    assert [row[5] for row in rows] == ["0.000", "1.000", *["0.000"] * 14]
    assert encode_tile_table(rows, ["FGFR3"]).decode().splitlines()[0] == "slide_id,x_px0,y_px0,side_px0,tissue,FGFR3"


def test_qupath_gets_the_outlines_of_foci_and_accidents(truth):
    pen = np.zeros((448, 448), bool)
    pen[300:340, 20:90] = True
    document = json.loads(encode_truth_geojson(truth, {"Pen": pen, "Fold": np.zeros_like(pen)}, "S001"))
    names = [feature["properties"]["classification"]["name"] for feature in document["features"]]
    assert names == ["FGFR3", "large", "Pen"]
    assert len({feature["id"] for feature in document["features"]}) == 3
    whole = Box(0, 0, 1792, 1792)
    drawn = rasterise(list(iterate_polygons(document["features"][2], whole)), truth.to_thumbnail(pen))
    assert cv2.countNonZero((drawn ^ pen).astype(np.uint8)) < 0.1 * pen.sum()


def test_crumbs_are_no_polygons(truth):
    crumbs = np.zeros((448, 448), bool)
    crumbs[5, 5] = crumbs[9, 9:11] = True
    crumbs[20:40, 20:40] = True
    crumbs[30, 30] = False  # a hole of one pixel
    document = json.loads(encode_truth_geojson(truth, {"Pen": crumbs}, "S001"))
    rings = [ring for feature in document["features"][2:] for ring in feature["geometry"]["coordinates"]]
    assert len(document["features"]) == 3
    assert all(len(ring) >= 4 and ring[0] == ring[-1] for ring in rings)


@pytest.mark.parametrize("text", ["{", "{}", '{"foci": 3}', "[]"])
def test_truth_that_is_damaged_says_so(tmp_path, truth, text):
    write(tmp_path, truth)
    (tmp_path / "S001.json").write_text(text)
    with pytest.raises(InputError, match="is damaged"):
        read_truth(tmp_path, "S001")


def test_truth_that_is_not_there_is_asked_for_by_name(tmp_path):
    with pytest.raises(InputError, match="no truth of slide S009"):
        read_truth(tmp_path, "S009")

"""Ground truth of synthetic slides: files can be read back, and the signal of each tile is correct."""

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
    tile_coverage_rows,
    truth_metadata,
)


@pytest.fixture
def truth():
    """A slide of 448 x 448 um at 0.25 um per pixel: tissue on its left half, a focus in the second quarter."""
    compartments = np.zeros((448, 448), np.uint8)
    compartments[:, :224] = Compartment.STROMA
    compartments[:, 112:224] = Compartment.EPITHELIUM
    focus = np.zeros_like(compartments)
    focus[:112, 112:224] = 1
    focus[112:168, 112:224] = 2
    return SlideTruth(compartments, focus, ("FGFR3", "large"), 1792, 1792, 0.25)


def write_truth(folder, truth, slide_id="S001"):
    (folder / f"{slide_id}.png").write_bytes(encode_truth_image(truth))
    (folder / f"{slide_id}.json").write_text(json.dumps(truth_metadata(truth)))


def test_read_truth_returns_what_was_written(tmp_path, truth):
    write_truth(tmp_path, truth)
    read = read_truth(tmp_path, "S001")
    np.testing.assert_array_equal(read.compartments, truth.compartments)
    np.testing.assert_array_equal(read.foci_map, truth.foci_map)
    assert (read.focus_names, read.width_px0, read.height_px0, read.slide_mpp) == (truth.focus_names, 1792, 1792, 0.25)


def test_signal_coverage_is_the_fraction_covered_by_the_focus(truth):
    positions = np.array([[448, 0], [448, 448], [0, 0], [672, 0], [448, 224]])
    assert truth.signal_coverage("FGFR3", positions, 448) == pytest.approx([1, 0, 0, 0.5, 0.5])
    assert truth.signal_coverage("large", positions, 448) == pytest.approx([0, 0.5, 0, 0, 0.5])
    assert truth.signal_coverage("EGFR", positions, 448).tolist() == [0, 0, 0, 0, 0]


def test_tile_table_has_the_default_grid_of_tapfm_tile(truth):
    rows = tile_coverage_rows("S001", truth, ["FGFR3"])
    assert [row[:4] for row in rows[:2]] == [["S001", "0", "0", "448"], ["S001", "448", "0", "448"]]
    assert len(rows) == 16
    assert [row[4] for row in rows] == ["1.000", "1.000", "0.000", "0.000"] * 4
    assert [row[5] for row in rows] == ["0.000", "1.000", *["0.000"] * 14]
    assert encode_tile_table(rows, ["FGFR3"]).decode().splitlines()[0] == "slide_id,x_px0,y_px0,side_px0,tissue,FGFR3"


def test_geojson_contains_outlines_of_foci_and_artefacts(truth):
    pen = np.zeros((448, 448), bool)
    pen[300:340, 20:90] = True
    document = json.loads(encode_truth_geojson(truth, {"Pen": pen, "Fold": np.zeros_like(pen)}, "S001"))
    names = [feature["properties"]["classification"]["name"] for feature in document["features"]]
    assert names == ["FGFR3", "large", "Pen"]
    assert len({feature["id"] for feature in document["features"]}) == 3
    whole = Box(0, 0, 1792, 1792)
    mask = rasterise(list(iterate_polygons(document["features"][2], whole)), truth.make_placeholder_thumbnail(pen))
    assert cv2.countNonZero((mask ^ pen).astype(np.uint8)) < 0.1 * pen.sum()


def test_components_of_one_or_two_pixels_are_not_polygons(truth):
    mask = np.zeros((448, 448), bool)
    mask[5, 5] = mask[9, 9:11] = True
    mask[20:40, 20:40] = True
    mask[30, 30] = False  # a hole of one pixel
    document = json.loads(encode_truth_geojson(truth, {"Pen": mask}, "S001"))
    rings = [ring for feature in document["features"][2:] for ring in feature["geometry"]["coordinates"]]
    assert len(document["features"]) == 3
    assert all(len(ring) >= 4 and ring[0] == ring[-1] for ring in rings)


@pytest.mark.parametrize("text", ["{", "{}", '{"foci": 3}', "[]"])
def test_damaged_truth_file_is_an_error(tmp_path, truth, text):
    write_truth(tmp_path, truth)
    (tmp_path / "S001.json").write_text(text)
    with pytest.raises(InputError, match="is damaged"):
        read_truth(tmp_path, "S001")


def test_missing_truth_file_is_an_error_with_the_slide_id(tmp_path):
    with pytest.raises(InputError, match="no ground truth of slide S009"):
        read_truth(tmp_path, "S009")

"""Tissue annotations: GeoJSON files and mask images are read exactly, and written outlines can be read back."""

import json

import numpy as np
import pytest
from PIL import Image
from slide_files import section, write_scn, write_slide

from tapfm.errors import SlideError
from tapfm.slides.annotations import encode_tissue_geojson, read_tissue_annotation, trace_outlines
from tapfm.slides.opening import open_slide


@pytest.fixture
def slide(tmp_path):
    return open_slide(write_slide(tmp_path / "slide.svs", section(2000, 1600)))


def ring(left, top, right, bottom):
    return [[left, top], [right, top], [right, bottom], [left, bottom], [left, top]]


def write_json(path, document):
    path.write_text(json.dumps(document))
    return path


RECTANGLE = {"type": "Polygon", "coordinates": [ring(400, 320, 1200, 960), ring(600, 480, 800, 640)]}


@pytest.mark.parametrize(
    "document",
    [
        {"type": "FeatureCollection", "features": [{"type": "Feature", "geometry": RECTANGLE, "properties": {}}]},
        [{"type": "Feature", "geometry": RECTANGLE, "properties": None}],
        {"type": "GeometryCollection", "geometries": [RECTANGLE]},
        {"type": "MultiPolygon", "coordinates": [RECTANGLE["coordinates"]]},
        RECTANGLE,
        {"type": "Feature", "geometry": RECTANGLE, "properties": {"classification": "Tissue"}},
    ],
    ids=["collection", "list", "geometries", "multi", "polygon", "class as text"],
)
def test_polygons_with_holes_are_rasterised_exactly(slide, tmp_path, document):
    thumbnail = slide.thumbnail(250)  # 8 level-0 pixels each
    mask = read_tissue_annotation(write_json(tmp_path / "a.geojson", document), slide.metadata, thumbnail)
    expected = np.zeros((200, 250), bool)
    expected[40:120, 50:150] = True
    expected[60:80, 75:100] = False
    assert (mask != expected).sum() < 250  # at most one pixel along the edges


def test_mask_image_of_any_size_is_resampled_exactly(slide, tmp_path):
    pixels = np.zeros((160, 200), np.uint8)
    pixels[32:96, 40:120] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    mask = read_tissue_annotation(tmp_path / "a.png", slide.metadata, slide.thumbnail(250))
    expected = np.zeros((200, 250), bool)
    expected[40:120, 50:150] = True
    np.testing.assert_array_equal(mask, expected)


def test_byte_order_mark_and_distant_points_are_accepted(slide, tmp_path):
    far = {"type": "Polygon", "coordinates": [ring(-1e12, -1e12, 1e12, 1e12)]}
    (tmp_path / "a.geojson").write_text(json.dumps(far), encoding="utf-8-sig")
    assert read_tissue_annotation(tmp_path / "a.geojson", slide.metadata, slide.thumbnail(250)).all()


def test_transparent_pixels_of_a_mask_are_not_tissue(slide, tmp_path):
    pixels = np.full((160, 200, 4), 255, np.uint8)
    pixels[:, 100:, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "a.png")
    mask = read_tissue_annotation(tmp_path / "a.png", slide.metadata, slide.thumbnail(250))
    assert mask[:, :125].all()
    assert not mask[:, 125:].any()


def test_annotations_ignored_by_qupath_are_ignored(slide, tmp_path):
    ignored = {"type": "Feature", "geometry": RECTANGLE, "properties": {"classification": {"name": "Ignore*"}}}
    with pytest.raises(SlideError, match="contains no polygon"):
        read_tissue_annotation(write_json(tmp_path / "a.geojson", ignored), slide.metadata, slide.thumbnail(250))


def test_mask_with_another_aspect_ratio_is_rejected(slide, tmp_path):
    Image.fromarray(np.zeros((200, 200), np.uint8)).save(tmp_path / "a.png")
    with pytest.raises(SlideError, match=r"200 x 200 pixels.*2,000 x 1,600"):
        read_tissue_annotation(tmp_path / "a.png", slide.metadata, slide.thumbnail(250))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "cannot be read"),
        ('{"type": "FeatureCollection"}', "cannot be read"),
        ('{"type": "FeatureCollection", "features": []}', "contains no polygon"),
        ('{"type": "Point", "coordinates": [1, 2]}', "contains no polygon"),
        ('{"type": "Polygon", "coordinates": [["a"]]}', "cannot be read"),
        ('{"type": "Polygon", "coordinates": [[]]}', "cannot be read"),
        ('{"type": "Polygon", "coordinates": [[[0, 0], [NaN, 1], [1, 1]]]}', "cannot be read"),
        ('{"type": "Feature", "geometry": null, "properties": {}}', "contains no polygon"),
    ],
)
def test_invalid_geojson_is_rejected(slide, tmp_path, content, message):
    (tmp_path / "a.geojson").write_text(content)
    with pytest.raises(SlideError, match=message):
        read_tissue_annotation(tmp_path / "a.geojson", slide.metadata, slide.thumbnail(250))


def test_written_outlines_can_be_read_back(slide, tmp_path):
    thumbnail = slide.thumbnail(250)
    rng = np.random.default_rng(0)
    mask = np.zeros((200, 250), bool)
    for x, y, side in rng.integers(5, 40, (12, 3)) * (5, 4, 1):
        mask[y : y + side, x : x + side] = True
    mask[100:110, 100:110] = False
    (tmp_path / "a.geojson").write_bytes(encode_tissue_geojson(mask, thumbnail, slide.metadata, "a"))
    again = read_tissue_annotation(tmp_path / "a.geojson", slide.metadata, thumbnail)
    assert (again != mask).mean() < 0.005
    feature = json.loads((tmp_path / "a.geojson").read_text())["features"][0]
    assert feature["properties"]["objectType"] == "annotation"
    assert feature["geometry"]["coordinates"][0][0] == feature["geometry"]["coordinates"][0][-1]


def test_qupath_coordinates_start_at_the_bounds(tmp_path):
    tissue = section(1024, 1024, tissue=(0, 0, 1, 1))
    slide = open_slide(write_scn(tmp_path / "a.scn", [(512, 256, tissue)], (4096, 2048)))
    thumbnail = slide.thumbnail(128)
    half = [ring(0, 0, 512, 1024)]
    qupath = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": half}}
    qupath["properties"] = {"objectType": "annotation"}
    from_bounds = read_tissue_annotation(write_json(tmp_path / "q.geojson", qupath), slide.metadata, thumbnail)
    assert from_bounds[:, :63].all()
    assert not from_bounds[:, 66:].any()
    absolute = {"type": "Polygon", "coordinates": [ring(512, 256, 1024, 1280)]}
    from_corner = read_tissue_annotation(write_json(tmp_path / "c.geojson", absolute), slide.metadata, thumbnail)
    np.testing.assert_array_equal(from_bounds, from_corner)


def test_mask_image_covers_the_whole_slide_not_its_bounds(tmp_path):
    tissue = section(1024, 1024, tissue=(0, 0, 1, 1))
    slide = open_slide(write_scn(tmp_path / "a.scn", [(512, 256, tissue)], (4096, 2048)))
    pixels = np.zeros((256, 512), np.uint8)  # 8 level-0 pixels each
    pixels[32:160, 64:128] = 255  # the left half of the bounds
    Image.fromarray(pixels).save(tmp_path / "a.png")
    mask = read_tissue_annotation(tmp_path / "a.png", slide.metadata, slide.thumbnail(128))
    assert mask[:, :64].all()
    assert not mask[:, 64:].any()


def test_empty_mask_has_no_outline():
    assert trace_outlines(np.zeros((20, 20), bool)) == []

"""GeoJSON for QuPath: squares, measurements, classes and stable ids."""

import json
import uuid
from dataclasses import replace

import numpy as np
from predicted_slides import CONTRIBUTION, make_tile_table, predicted_slide, tile_positions

from tapfm.prediction.geojson import write_geojson
from tapfm.prediction.layers import _DIVERGING as DIVERGING
from tapfm.prediction.layers import percentiles
from tapfm.slides.annotations import _read_polygons as read_polygons
from tapfm.slides.slide import Box


def write_and_read(folder, predicted, table):
    write_geojson(folder / "tiles.geojson", predicted, table)
    return json.loads((folder / "tiles.geojson").read_text())


def test_every_tile_has_its_square_and_all_measurements(tmp_path):
    predicted = predicted_slide(mpp=0.2527, bounds=Box(300, 200, 1900, 1500))
    table = make_tile_table(predicted, tile_positions(predicted))
    document = write_and_read(tmp_path, predicted, table)
    assert set(document) == {"type", "features"}
    assert document["type"] == "FeatureCollection"
    assert len(document["features"]) == len(table) > 5
    ranks = percentiles(table.values[CONTRIBUTION.column])
    for row, feature in enumerate(document["features"]):
        assert set(feature) == {"type", "id", "geometry", "properties"}
        properties = feature["properties"]
        assert (properties["objectType"], properties["isLocked"]) == ("tile", True)
        assert properties["measurements"] == {
            **{name: values[row] for name, values in table.values.items()},
            f"{CONTRIBUTION.column} percentile": ranks[row],
        }
    polygons = read_polygons(tmp_path / "tiles.geojson", predicted.bounds)
    for (x, y), (ring,) in zip(table.positions, polygons, strict=True):
        side = predicted.side_px0
        np.testing.assert_array_equal(ring, [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]])


def test_padded_tiles_have_a_measurement(tmp_path):
    predicted = predicted_slide()
    table = make_tile_table(predicted, tile_positions(predicted)[:3])
    marked = replace(table, padded=np.array([False, True, False]))
    features = write_and_read(tmp_path, predicted, marked)["features"]
    assert [each["properties"]["measurements"]["padded"] for each in features] == [0, 1, 0]


def test_ids_are_stable_unique_uuids(tmp_path):
    predicted = predicted_slide()
    table = make_tile_table(predicted, tile_positions(predicted))
    first = [each["id"] for each in write_and_read(tmp_path, predicted, table)["features"]]
    data = (tmp_path / "tiles.geojson").read_bytes()
    other_values = make_tile_table(predicted, table.positions, np.arange(len(table)))
    assert [each["id"] for each in write_and_read(tmp_path, predicted, other_values)["features"]] == first
    assert len({uuid.UUID(each) for each in first}) == len(table)
    write_geojson(tmp_path / "tiles.geojson", predicted, table)
    assert (tmp_path / "tiles.geojson").read_bytes() == data


def test_highest_and_lowest_tenth_have_a_class_in_heatmap_colours(tmp_path):
    predicted = predicted_slide()
    positions = tile_positions(predicted)[:40]
    features = write_and_read(tmp_path, predicted, make_tile_table(predicted, positions, np.arange(40) - 20.0))[
        "features"
    ]
    classes = [each["properties"].get("classification") for each in features]
    title = CONTRIBUTION.title
    assert classes[:4] == [{"name": f"{title}: lowest 10%", "color": list(DIVERGING[0])}] * 4
    assert classes[-4:] == [{"name": f"{title}: highest 10%", "color": list(DIVERGING[-1])}] * 4
    assert classes[4:-4] == [None] * 32


def test_equal_tiles_have_no_class_and_non_finite_values_are_omitted(tmp_path):
    predicted = predicted_slide()
    table = make_tile_table(predicted, tile_positions(predicted)[:3], [1.0, 1.0, 1.0])
    table.values["attention"] = np.array([0.5, np.nan, np.inf])
    features = write_and_read(tmp_path, predicted, table)["features"]
    assert all("classification" not in each["properties"] for each in features)
    assert ["attention" in each["properties"]["measurements"] for each in features] == [True, False, False]


def test_no_tiles_give_an_empty_collection(tmp_path):
    predicted = predicted_slide()
    assert write_and_read(tmp_path, predicted, make_tile_table(predicted, np.empty((0, 2), int)))["features"] == []

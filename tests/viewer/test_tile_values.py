"""The binary format of tile values, and layer descriptions."""

import json
import struct

import numpy as np
from predicted_slides import CONTRIBUTION, make_tile_table, predicted_slide

from tapfm.prediction.layers import palette, percentiles
from tapfm.viewer.tile_values import colour_palettes, describe_layer, pack_tile_values

POSITIONS = np.array([[0, 0], [224, 0], [0, 224], [70_000, 90_000]])


def unpack(data):
    (length,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + length])
    start = -(-(4 + length) // 4) * 4
    columns = {}
    for name in header["columns"]:
        dtype = "<i4" if name in ("x", "y") else "<f4"
        columns[name] = np.frombuffer(data, dtype, header["count"], start)
        start += 4 * header["count"]
    assert start == len(data)
    return columns


def test_unpacked_positions_values_and_percentiles_are_unchanged():
    predicted = predicted_slide(targets=("A", "B ü"))
    table = make_tile_table(predicted, POSITIONS)
    columns = unpack(pack_tile_values(table, predicted.layers))
    np.testing.assert_array_equal(columns.pop("x"), POSITIONS[:, 0])
    np.testing.assert_array_equal(columns.pop("y"), POSITIONS[:, 1])
    assert set(columns) == {f"{prefix}{name}" for prefix in ("", "percentile.") for name in predicted.columns}
    for name in predicted.columns:
        np.testing.assert_array_equal(columns[name], table.values[name].astype(np.float32))
        np.testing.assert_allclose(columns[f"percentile.{name}"], percentiles(table.values[name]), rtol=1e-6)


def test_the_description_of_a_layer_contains_range_unit_and_ticks():
    predicted = predicted_slide()
    description = describe_layer(CONTRIBUTION, make_tile_table(predicted, POSITIONS, [-2.0, 0.0, 1.0, 1.5]))
    assert description["scale"]["diverging"]
    assert description["scale"]["low"] == -description["scale"]["high"]
    assert "logit" in description["scale"]["unit"]
    assert 0 in description["scale"]["ticks"]
    assert "percentile" in description["percentile_scale"]["unit"]
    assert description["percentile_scale"] | {"unit": ""} == {
        "low": 0,
        "high": 100,
        "unit": "",
        "diverging": False,
        "ticks": [0, 25, 50, 75, 100],
    }


def test_the_palettes_are_those_of_all_heatmaps():
    palettes = colour_palettes()
    np.testing.assert_array_equal(palettes["diverging"], palette(diverging=True))
    np.testing.assert_array_equal(palettes["sequential"], palette(diverging=False))

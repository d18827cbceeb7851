"""The block of numbers that the page reads."""

import json
import struct

import numpy as np
from predicted_slides import CONTRIBUTION, predicted_slide, table_of

from tapfm.prediction.layers import palette, percentiles
from tapfm.viewer.tile_numbers import describe, pack, palettes

POSITIONS = np.array([[0, 0], [224, 0], [0, 224], [70_000, 90_000]])


def unpack(block):
    (length,) = struct.unpack_from("<I", block)
    header = json.loads(block[4 : 4 + length])
    start = -(-(4 + length) // 4) * 4
    columns = {}
    for name in header["columns"]:
        kind = "<i4" if name in ("x", "y") else "<f4"
        columns[name] = np.frombuffer(block, kind, header["count"], start)
        start += 4 * header["count"]
    assert start == len(block)
    return columns


def test_positions_values_and_percentiles_come_back():
    predicted = predicted_slide(targets=("A", "B ü"))
    table = table_of(predicted, POSITIONS)
    columns = unpack(pack(table, predicted.layers))
    np.testing.assert_array_equal(columns.pop("x"), POSITIONS[:, 0])
    np.testing.assert_array_equal(columns.pop("y"), POSITIONS[:, 1])
    assert set(columns) == {f"{kind}{name}" for kind in ("", "percentile.") for name in predicted.columns}
    for name in predicted.columns:
        np.testing.assert_array_equal(columns[name], table.values[name].astype(np.float32))
        np.testing.assert_allclose(columns[f"percentile.{name}"], percentiles(table.values[name]), rtol=1e-6)


def test_a_layer_says_its_unit_its_ends_and_its_ticks():
    predicted = predicted_slide()
    told = describe(CONTRIBUTION, table_of(predicted, POSITIONS, [-2.0, 0.0, 1.0, 1.5]))
    assert told["scale"]["diverging"]
    assert told["scale"]["low"] == -told["scale"]["high"]
    assert "logit" in told["scale"]["unit"]
    assert 0 in told["scale"]["ticks"]
    assert told["percentile_scale"] == {
        "low": 0,
        "high": 100,
        "unit": "percentile among the slide's tiles",
        "diverging": False,
        "ticks": [0, 25, 50, 75, 100],
    }


def test_colours_are_those_of_all_maps():
    told = palettes()
    np.testing.assert_array_equal(told["diverging"], palette(diverging=True))
    np.testing.assert_array_equal(told["sequential"], palette(diverging=False))

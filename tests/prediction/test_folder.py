"""Files of a prediction folder can be read back."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from tapfm.errors import InputError
from tapfm.prediction.folder import PredictedSlide, PredictionFolder, TargetPrediction
from tapfm.prediction.tile_table import TileTable, read_tile_table, write_tile_table
from tapfm.slides.slide import Box


def build_prediction(tmp_path, slide_id="S1"):
    return PredictedSlide(
        slide_id=slide_id,
        patient_id="P1",
        cohort=None,
        split="test",
        path=tmp_path / "S1.svs",
        width_px0=1000,
        height_px0=900,
        bounds=Box(100, 50, 800, 700),
        mpp=0.2527,
        side_px0=443,
        tile_px=224,
        columns=("attention", "weight", "contribution.A", "contribution.B"),
        targets={
            "A": TargetPrediction(0.1, 0.525, 0.5, 1, None, -0.3),
            "B": TargetPrediction(-1.0, 0.27, None, None, 0, -0.3),
        },
        tiles=3,
        tiles_failed=1,
        seconds=1.25,
        key="k",
    )


def table():
    rng = np.random.default_rng(0)
    names = ("attention", "weight", "contribution.A", "contribution.B")
    return TileTable(np.array([[100, 50], [543, 50], [100, 493]]), {name: rng.normal(size=3) for name in names})


def test_slide_json_can_be_read_back(tmp_path):
    slide = build_prediction(tmp_path)
    slide.write(tmp_path / "per-slide" / "S1")
    (read,) = PredictionFolder(tmp_path).slides()
    assert read == slide
    assert [layer.column for layer in read.layers] == ["contribution.A", "contribution.B", "weight", "attention"]


@pytest.mark.parametrize(
    ("tiles", "warning"), [(1, "only 1 tile"), (7, "only 7 tiles"), (19, "only 19 tiles"), (20, ""), (300, "")]
)
def test_slide_json_has_a_warning_for_fewer_than_20_tiles(tmp_path, tiles, warning):
    slide = replace(build_prediction(tmp_path), tiles=tiles)
    slide.write(tmp_path)
    assert slide.warning == json.loads((tmp_path / "slide.json").read_text())["warning"] == warning
    assert PredictedSlide.read(tmp_path) == slide


def test_slide_json_without_the_source_of_the_scale_can_be_read(tmp_path):
    slide = build_prediction(tmp_path)
    slide.write(tmp_path)
    stored = json.loads((tmp_path / "slide.json").read_text())
    assert stored.pop("mpp_source") is None
    del stored["warning"]
    (tmp_path / "slide.json").write_text(json.dumps(stored))  # as written by an earlier version
    assert PredictedSlide.read(tmp_path) == slide


def test_tile_tables_can_be_read_back_and_are_deterministic(tmp_path):
    for name in ("first", "second"):
        write_tile_table(tmp_path / name, table())
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    read = read_tile_table(tmp_path / "first")
    np.testing.assert_array_equal(read.positions, table().positions)
    assert read.positions.dtype == np.int64
    assert list(read.values) == list(table().values)
    for name, values in table().values.items():
        np.testing.assert_array_equal(read.values[name], values)


def test_mark_of_padded_tiles_can_be_read_back(tmp_path):
    assert read_back(tmp_path, table()).padded is None
    read = read_back(tmp_path, replace(table(), padded=np.array([False, True, False])))
    assert read.padded.tolist() == [False, True, False]
    assert list(read.values) == list(table().values)


def read_back(folder, tiles):
    write_tile_table(folder / "tiles.parquet", tiles)
    return read_tile_table(folder / "tiles.parquet")


@pytest.mark.parametrize("content", [b"", b"PAR1 not really"])
def test_damaged_tile_table_is_reported(tmp_path, content):
    (tmp_path / "tiles.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"tiles\.parquet"):
        read_tile_table(tmp_path / "tiles.parquet")


@pytest.mark.parametrize("text", ["", "[]", '{"slide_id": "S1"}'])
def test_damaged_slide_json_is_reported(tmp_path, text):
    (tmp_path / "slide.json").write_text(text)
    with pytest.raises(InputError, match=r"slide\.json"):
        PredictedSlide.read(tmp_path)


def test_other_folder_is_an_error_that_names_the_command(tmp_path):
    assert not PredictionFolder(tmp_path).exists
    with pytest.raises(InputError, match=re.escape(str(tmp_path))) as raised:
        PredictionFolder(tmp_path).read_metadata()
    assert "tapfm predict --model" in raised.value.hint
    (tmp_path / "prediction.json").write_text(json.dumps({"model": "runs/first"}))
    assert PredictionFolder(tmp_path).read_metadata() == {"model": "runs/first"}

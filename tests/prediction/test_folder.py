"""The files of a prediction come back as they were written."""

import json

import numpy as np
import pytest

from tapfm.errors import InputError
from tapfm.prediction.folder import PredictedSlide, PredictionFolder, TargetPrediction
from tapfm.prediction.tile_table import TileTable, read_tile_table, write_tile_table
from tapfm.slides.slide import Box


def predicted(tmp_path, slide_id="S1"):
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


def test_a_slide_comes_back(tmp_path):
    slide = predicted(tmp_path)
    slide.write(tmp_path / "per-slide" / "S1")
    (read,) = PredictionFolder(tmp_path).slides()
    assert read == slide
    assert [layer.column for layer in read.layers] == ["contribution.A", "contribution.B", "weight", "attention"]


def test_tiles_come_back_and_the_same_table_is_the_same_file(tmp_path):
    for name in ("first", "second"):
        write_tile_table(tmp_path / name, table())
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    read = read_tile_table(tmp_path / "first")
    np.testing.assert_array_equal(read.positions, table().positions)
    assert read.positions.dtype == np.int64
    assert list(read.values) == list(table().values)
    for name, values in table().values.items():
        np.testing.assert_array_equal(read.values[name], values)


@pytest.mark.parametrize("content", [b"", b"PAR1 not really"])
def test_a_damaged_table_is_told(tmp_path, content):
    (tmp_path / "tiles.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"tiles\.parquet cannot be read"):
        read_tile_table(tmp_path / "tiles.parquet")


@pytest.mark.parametrize("text", ["", "[]", '{"slide_id": "S1"}'])
def test_a_damaged_slide_is_told(tmp_path, text):
    (tmp_path / "slide.json").write_text(text)
    with pytest.raises(InputError, match=r"slide\.json cannot be read"):
        PredictedSlide.read(tmp_path)


def test_a_folder_that_is_none_says_what_to_type(tmp_path):
    assert not PredictionFolder(tmp_path).begun
    with pytest.raises(InputError, match="is no folder of predictions") as told:
        PredictionFolder(tmp_path).about()
    assert "tapfm predict --model" in told.value.hint
    (tmp_path / "prediction.json").write_text(json.dumps({"model": "runs/first"}))
    assert PredictionFolder(tmp_path).about() == {"model": "runs/first"}

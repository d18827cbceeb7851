"""Heatmaps, galleries and GeoJSON of a slide: which files are written, and under which names."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from predicted_slides import make_tile_table, predicted_file, tile_positions, write_prediction
from slide_files import section, write_slide
from support import randomise

from tapfm.aggregators.catalog import build_aggregator
from tapfm.errors import InputError, UnreadableSlideError
from tapfm.prediction.layers import list_layers
from tapfm.prediction.slide_outputs import _MAX_WITH_PERCENTILES as MAX_WITH_PERCENTILES
from tapfm.prediction.slide_outputs import _drop_redundant_weights as drop_redundant_weights
from tapfm.prediction.slide_outputs import _name_files as name_files
from tapfm.prediction.slide_outputs import _select_heatmaps as select_heatmaps
from tapfm.prediction.slide_outputs import write_slide_outputs
from tapfm.prediction.tile_table import TILES_PARQUET, TileTable
from tapfm.runtime.files import UNFINISHED_SUFFIX
from tapfm.slides.slide import Box


@pytest.fixture
def prediction(tmp_path):
    path = write_slide(tmp_path / "s.svs", section(700, 500))
    predicted = predicted_file(path)
    folder = tmp_path / "per-slide" / "case-17"
    return write_prediction(folder, predicted, make_tile_table(predicted, tile_positions(predicted))), folder


def file_names(folder):
    return {path.name for path in folder.iterdir()} - {"slide.json", TILES_PARQUET}


EXPECTED = {
    *("heatmap-contribution-FGFR3.png", "heatmap-contribution-FGFR3-percentile.png"),
    *("heatmap-contribution-FGFR3.tif", "heatmap-contribution-FGFR3-percentile.tif"),
    *("heatmap-attention.png", "heatmap-attention-percentile.png"),
    *("heatmap-attention.tif", "heatmap-attention-percentile.tif"),
    *("heatmap-weight.png", "heatmap-weight-percentile.png", "heatmap-weight.tif", "heatmap-weight-percentile.tif"),
    *("gallery-contribution-FGFR3.png", "gallery-attention.png", "gallery-weight.png"),
}


@pytest.mark.parametrize("heatmaps", [False, True])
@pytest.mark.parametrize("geojson", [False, True])
def test_requested_outputs_are_written_and_returned(prediction, heatmaps, geojson):
    predicted, folder = prediction
    written = write_slide_outputs(predicted, folder, heatmaps=heatmaps, geojson=geojson)
    expected = (EXPECTED if heatmaps else set()) | ({"tiles.geojson"} if geojson else set())
    assert file_names(folder) == expected
    assert {path.name for path in written} == expected
    assert len(written) == len(expected)


def test_outputs_are_deterministic(prediction):
    predicted, folder = prediction
    first = {path: path.read_bytes() for path in write_slide_outputs(predicted, folder, heatmaps=True, geojson=True)}
    for path in first:
        path.write_bytes(b"half a file")
    again = {path: path.read_bytes() for path in write_slide_outputs(predicted, folder, heatmaps=True, geojson=True)}
    assert again == first
    assert not list(folder.glob(f"*{UNFINISHED_SUFFIX}"))


def test_missing_slide_file_leaves_geojson_and_tiff(prediction):
    predicted, folder = prediction
    predicted.path.unlink()
    with pytest.raises(UnreadableSlideError):
        write_slide_outputs(predicted, folder, heatmaps=True, geojson=True)
    assert file_names(folder) == {"tiles.geojson", *(name for name in EXPECTED if name.endswith(".tif"))}


@pytest.mark.parametrize(
    ("change", "stated"),
    [
        ({"height_px0": 501}, r"700 x 500 pixels.* case-17 had 700 x 501"),
        ({"bounds": Box(8, 0, 692, 500)}, r"case-17 had 700 x 500 .*bounds"),
    ],
)
def test_file_of_another_slide_is_an_error(prediction, change, stated):
    predicted, folder = prediction
    with pytest.raises(InputError, match=stated):
        write_slide_outputs(replace(predicted, **change), folder, heatmaps=True, geojson=False)
    assert {name for name in file_names(folder) if name.endswith(".png")} == set()


def test_missing_tile_table_is_named(prediction):
    predicted, folder = prediction
    shutil.move(folder / TILES_PARQUET, folder / "gone")
    with pytest.raises(InputError, match=TILES_PARQUET):
        write_slide_outputs(predicted, folder, heatmaps=True, geojson=True)


def test_main_layers_and_shared_weights_and_attention_are_drawn():
    def columns(*available, targets=("A", "B")):
        return [each.layer.column for each in select_heatmaps(list_layers(available, targets)) if not each.percentile]

    every = ("attention", "weight", "contribution.A", "contribution.B")
    assert columns(*every) == ["contribution.A", "contribution.B", "weight", "attention"]
    assert columns("weight", "contribution.A", targets=("A",)) == ["contribution.A", "weight"]
    assert columns("attention", "score.A", "score.B", "weight.A", "weight.B") == ["score.A", "score.B", "attention"]
    assert columns("attention", "weight.A", "weight.B") == ["weight.A", "weight.B", "attention"]
    assert columns("attention") == ["attention"]
    assert columns() == []


@pytest.mark.parametrize(("aggregator", "own"), [("cls-attention", False), ("cls-gated", True), ("abmil", True)])
def test_weights_are_drawn_only_if_they_rank_tiles_differently_than_attention(aggregator, own):
    torch.manual_seed(0)
    pooled = build_aggregator(aggregator, 16, 1)
    randomise(pooled, 0)
    r_K = torch.rand(5000) * 1e-3 + 4e-3
    with torch.no_grad():
        weights = pooled(torch.randn(5000, 16), r_K).tile_weights.reshape(-1)
    values = {"attention": r_K.double().numpy(), "weight": weights.double().numpy()}
    layers = drop_redundant_weights(list_layers(values, ["A"]), TileTable(np.zeros((5000, 2), int), values))
    assert [layer.column for layer in layers] == (["weight"] if own else []) + ["attention"]


def test_many_targets_have_one_heatmap_each():
    targets = [f"T{number}" for number in range(MAX_WITH_PERCENTILES + 1)]
    maps = select_heatmaps(list_layers([f"contribution.{target}" for target in targets], targets))
    assert len(maps) == MAX_WITH_PERCENTILES + 1
    few = targets[:MAX_WITH_PERCENTILES]
    assert (
        len(select_heatmaps(list_layers([f"contribution.{target}" for target in few], few))) == 2 * MAX_WITH_PERCENTILES
    )


def test_file_names_of_similar_targets_are_unique():
    targets = ["a b", "a/b", "KRAS", "kras", "x", "x-percentile"]
    maps = select_heatmaps(list_layers([f"contribution.{target}" for target in targets], targets))
    found = name_files(maps)
    assert len({name.casefold() for name in found.values()}) == len(maps) == 2 * len(targets)
    alone = name_files([each for each in maps if each.layer.target == "KRAS"])
    assert sorted(alone.values()) == ["contribution-KRAS", "contribution-KRAS-percentile"]

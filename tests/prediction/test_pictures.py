"""All pictures of a slide: which files there are, and that none takes the place of another."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from predicted_slides import grid_of, predicted_file, table_of, write_prediction
from slide_files import section, write_slide
from support import randomise

from tapfm.aggregators.catalog import build_aggregator
from tapfm.errors import InputError, UnreadableSlideError
from tapfm.prediction.layers import layers_of
from tapfm.prediction.pictures import _FEW as FEW
from tapfm.prediction.pictures import _maps_of as maps_of
from tapfm.prediction.pictures import _names_of as names_of
from tapfm.prediction.pictures import _telling as telling
from tapfm.prediction.pictures import draw_slide
from tapfm.prediction.tile_table import NAME, TileTable
from tapfm.runtime.files import UNFINISHED
from tapfm.slides.slide import Box


@pytest.fixture
def prediction(tmp_path):
    path = write_slide(tmp_path / "s.svs", section(700, 500))
    predicted = predicted_file(path)
    folder = tmp_path / "per-slide" / "case-17"
    return write_prediction(folder, predicted, table_of(predicted, grid_of(predicted))), folder


def names(folder):
    return {path.name for path in folder.iterdir()} - {"slide.json", NAME}


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
def test_what_was_asked_for_is_written_and_said(prediction, heatmaps, geojson):
    predicted, folder = prediction
    written = draw_slide(predicted, folder, heatmaps=heatmaps, geojson=geojson)
    expected = (EXPECTED if heatmaps else set()) | ({"tiles.geojson"} if geojson else set())
    assert names(folder) == expected
    assert {path.name for path in written} == expected
    assert len(written) == len(expected)


def test_drawn_again_the_files_are_the_same(prediction):
    predicted, folder = prediction
    first = {path: path.read_bytes() for path in draw_slide(predicted, folder, heatmaps=True, geojson=True)}
    for path in first:
        path.write_bytes(b"half a file")
    again = {path: path.read_bytes() for path in draw_slide(predicted, folder, heatmaps=True, geojson=True)}
    assert again == first
    assert not list(folder.glob(f"*{UNFINISHED}"))


def test_without_the_slide_there_is_what_needs_no_slide(prediction):
    predicted, folder = prediction
    predicted.path.unlink()
    with pytest.raises(UnreadableSlideError):
        draw_slide(predicted, folder, heatmaps=True, geojson=True)
    assert names(folder) == {"tiles.geojson", *(name for name in EXPECTED if name.endswith(".tif"))}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"height_px0": 501}, r"700 x 500 pixels; case-17 had 700 x 501 when"),
        ({"bounds": Box(8, 0, 692, 500)}, r"700 x 500 when it was predicted, and other bounds"),
    ],
)
def test_another_slide_of_that_name_is_refused(prediction, change, said):
    predicted, folder = prediction
    with pytest.raises(InputError, match=said):
        draw_slide(replace(predicted, **change), folder, heatmaps=True, geojson=False)
    assert {name for name in names(folder) if name.endswith(".png")} == set()


def test_without_tiles_the_file_is_named(prediction):
    predicted, folder = prediction
    shutil.move(folder / NAME, folder / "gone")
    with pytest.raises(InputError, match=NAME):
        draw_slide(predicted, folder, heatmaps=True, geojson=True)


def test_what_says_most_is_drawn_for_each_target_and_where_the_model_looked():
    def columns(*those, targets=("A", "B")):
        return [each.layer.column for each in maps_of(layers_of(those, targets)) if not each.percentile]

    every = ("attention", "weight", "contribution.A", "contribution.B")
    assert columns(*every) == ["contribution.A", "contribution.B", "weight", "attention"]
    assert columns("weight", "contribution.A", targets=("A",)) == ["contribution.A", "weight"]
    assert columns("attention", "score.A", "score.B", "weight.A", "weight.B") == ["score.A", "score.B", "attention"]
    assert columns("attention", "weight.A", "weight.B") == ["weight.A", "weight.B", "attention"]
    assert columns("attention") == ["attention"]
    assert columns() == []


@pytest.mark.parametrize(("aggregator", "own"), [("cls-attention", False), ("cls-gated", True), ("abmil", True)])
def test_weights_are_drawn_where_they_are_not_those_of_the_attention(aggregator, own):
    torch.manual_seed(0)
    pooled = build_aggregator(aggregator, 16, 1)
    randomise(pooled, 0)
    r_K = torch.rand(5000) * 1e-3 + 4e-3
    with torch.no_grad():
        weights = pooled(torch.randn(5000, 16), r_K).tile_weights.reshape(-1)
    values = {"attention": r_K.double().numpy(), "weight": weights.double().numpy()}
    layers = telling(layers_of(values, ["A"]), TileTable(np.zeros((5000, 2), int), values))
    assert [layer.column for layer in layers] == (["weight"] if own else []) + ["attention"]


def test_many_targets_have_one_map_each():
    targets = [f"T{number}" for number in range(FEW + 1)]
    maps = maps_of(layers_of([f"contribution.{target}" for target in targets], targets))
    assert len(maps) == FEW + 1
    few = targets[:FEW]
    assert len(maps_of(layers_of([f"contribution.{target}" for target in few], few))) == 2 * FEW


def test_targets_that_would_share_a_name_do_not_share_a_file():
    targets = ["a b", "a/b", "KRAS", "kras", "x", "x-percentile"]
    maps = maps_of(layers_of([f"contribution.{target}" for target in targets], targets))
    found = names_of(maps)
    assert len({name.casefold() for name in found.values()}) == len(maps) == 2 * len(targets)
    alone = names_of([each for each in maps if each.layer.target == "KRAS"])
    assert sorted(alone.values()) == ["contribution-KRAS", "contribution-KRAS-percentile"]

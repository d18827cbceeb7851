"""What models say of a whole slide and of its tiles."""

import numpy as np
import pytest
import torch
from support import randomise, small_encoder, some_tiles

from tapfm.aggregators.catalog import build_aggregator
from tapfm.errors import InputError, NonFiniteError
from tapfm.evaluation.predictions import sigmoid
from tapfm.model import SlideModel
from tapfm.prediction.whole_slide import Models
from tapfm.tasks.catalog import build_task

TARGETS = ("EGFR", "KRAS")


def model(seed=0, aggregator="cls-attention", targets=TARGETS, family="registers", **settings):
    encoder = small_encoder(family, seed=seed, dtype=torch.float32)
    torch.manual_seed(seed)
    built = build_aggregator(aggregator, encoder.feature_size, len(targets), **settings)
    randomise(built, seed)
    return SlideModel(encoder, built, build_task({target: [0, 1] for target in targets}))


def asked(*models, tiles=9, batch=4):
    several = Models(models, batch=batch)
    encoded = several.encode(some_tiles(models[0].encoder, tiles), 64)
    return several.ask("S1", encoded, None), encoded


@pytest.mark.parametrize("layer_norm", [False, True])
def test_one_model_says_what_it_says_elsewhere_and_what_each_tile_gave(layer_norm):
    one = model(layer_norm=layer_norm)
    whole, encoded = asked(one)
    by_itself = one.logits(one.encode(some_tiles(one.encoder, 9), 4))
    assert list(whole.logits.values()) == by_itself.double().tolist()
    assert list(whole.columns) == ["attention", "weight", "contribution.EGFR", "contribution.KRAS"]
    assert whole.columns["attention"].tolist() == encoded.r_K.double().tolist()
    assert whole.columns["weight"].sum() == pytest.approx(1, abs=1e-6)
    for target in TARGETS:
        total = whole.constants[target] + whole.columns[f"contribution.{target}"].sum()
        assert total == pytest.approx(whole.logits[target], abs=1e-5)


@pytest.mark.parametrize(
    ("aggregator", "columns"),
    [
        ("cls-gated", ["attention", "weight.EGFR", "weight.KRAS", "contribution.EGFR", "contribution.KRAS"]),
        ("max", ["attention", "score.EGFR", "score.KRAS"]),
        ("mean", ["attention", "score.EGFR", "score.KRAS", "contribution.EGFR", "contribution.KRAS"]),
        ("abmil", ["attention", "weight", "contribution.EGFR", "contribution.KRAS"]),
    ],
)
def test_columns_are_what_the_aggregator_has_to_say(aggregator, columns):
    whole, _ = asked(model(aggregator=aggregator))
    assert list(whole.columns) == columns
    assert all(len(values) == 9 and np.isfinite(values).all() for values in whole.columns.values())
    assert (whole.constants["EGFR"] is None) == (aggregator == "max")


def test_a_single_target_shares_its_weights_with_nobody():
    whole, _ = asked(model(aggregator="cls-gated", targets=("FGFR3",)))
    assert list(whole.columns) == ["attention", "weight", "contribution.FGFR3"]


def test_an_ensemble_is_the_mean_of_probabilities_and_its_maps_the_mean_of_maps():
    members = [model(0), model(1), model(2, "max")]
    whole, _ = asked(*members)
    alone = [Models([each], batch=4) for each in members]
    said = [each.ask("S1", each.encode(some_tiles(members[0].encoder, 9), 64), None) for each in alone]
    for target in TARGETS:
        mean = np.mean([sigmoid(each.logits[target]) for each in said])
        assert sigmoid(whole.logits[target]) == pytest.approx(mean, abs=1e-12)
        assert whole.constants[target] is None
    assert list(whole.columns) == ["attention"]  # which is all that the third has in common with the others
    np.testing.assert_array_equal(whole.columns["attention"], np.mean([each.columns["attention"] for each in said], 0))


def test_members_of_different_encoders_each_get_their_own_features():
    first, second = model(0), model(1, family="SwiGLU")
    several = Models([first, second], batch=3)
    tiles = some_tiles(first.encoder, 7)
    parts = several._parts(several.encode(tiles, 64))
    for each, part in zip((first, second), parts, strict=True):
        own = each.encode(tiles, 3)
        assert torch.equal(part.z_KD, own.z_KD)
        assert torch.equal(part.r_K, own.r_K)


def test_members_that_take_other_tiles_are_refused():
    with pytest.raises(InputError, match="different sizes: 42, 48 px"):
        Models([model(0), model(1, family="plain ViT")], batch=4)


def test_the_batch_is_halved_until_it_fits(monkeypatch):
    one, tried, told = model(), [], []
    encode = one.encode

    def with_little_memory(tiles, batch):
        tried.append(batch)
        if batch > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(tiles, batch)

    monkeypatch.setattr(one, "encode", with_little_memory)
    several = Models([one], batch=16, may_shrink=True, shrunk=told.append)
    tiles = some_tiles(one.encoder, 9)
    assert torch.equal(several.encode(tiles, 64).r_K, encode(tiles, 2).r_K)
    assert (tried, told) == ([16, 8, 4, 2], [8, 4, 2])
    several.encode(tiles, 64)
    assert tried[4:] == [2]  # it is remembered
    with pytest.raises(torch.OutOfMemoryError):
        Models([one], batch=16).encode(tiles, 64)  # who names a batch means it


def test_a_model_that_has_become_no_number_is_refused():
    one = model()
    with torch.no_grad():
        one.aggregator.classifier.bias[0] = torch.nan
    with pytest.raises(NonFiniteError, match="'S1'"):
        asked(one)

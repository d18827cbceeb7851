"""A logit is a constant and what each tile gives to it, without a rest."""

import pytest
import torch
from bags_of_tiles import KINDS, bag, built

from tapfm.aggregators.cls_attention import ClsAttention
from tapfm.aggregators.heads import contributions

WITHOUT = {"max"}  # one tile decides: there is no sum


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WITHOUT])
def test_they_sum_to_the_logit_less_its_constant(kind, targets, layer_norm):
    aggregator = built(kind, targets=targets, layer_norm=layer_norm).eval()
    z_KD, r_K = bag()
    output = aggregator(z_KD, r_K)
    given = output.contributions()
    assert given.per_tile_CK.shape == (targets, len(z_KD))
    torch.testing.assert_close(given.constant_C + given.per_tile_CK.sum(1), output.logits_C, rtol=0, atol=1e-12)
    assert given.per_tile_CK.std(1).min() > 1e-6  # tiles differ


@pytest.mark.parametrize("kind", sorted(WITHOUT))
def test_aggregators_without_a_sum_do_not_claim_one(kind):
    assert built(kind)(*bag()).contributions is None


def test_without_a_norm_a_tile_gives_its_weight_times_its_own_logit():
    aggregator = built("cls-attention", targets=2)
    z_KD, r_K = bag()
    output = aggregator(z_KD, r_K)
    given = output.contributions()
    for i, (weight, z_D) in enumerate(zip(output.tile_weights, z_KD, strict=True)):
        torch.testing.assert_close(given.per_tile_CK[:, i], weight * (aggregator.classifier.weight @ z_D))
    torch.testing.assert_close(given.constant_C, aggregator.classifier.bias)


def test_with_a_layer_norm_a_tile_gives_what_the_formula_says():
    """a_i sum_d W_d gamma_d (z_id - mean(z_i)) / sigma(Z), written out number by number."""
    aggregator = built("cls-attention", feature_size=5, targets=1, layer_norm=True)
    z_KD, r_K = bag(tiles=4, feature_size=5)
    output = aggregator(z_KD, r_K)
    a, z = output.tile_weights.tolist(), z_KD.tolist()
    W, gamma, beta = (each.tolist() for each in (aggregator.classifier.weight[0], *aggregator.norm.parameters()))
    Z = [sum(a[i] * z[i][d] for i in range(4)) for d in range(5)]
    mean = sum(Z) / 5
    sigma = (sum((each - mean) ** 2 for each in Z) / 5 + aggregator.norm.eps) ** 0.5
    of_tiles = [a[i] * sum(W[d] * gamma[d] * (z[i][d] - sum(z[i]) / 5) for d in range(5)) / sigma for i in range(4)]
    given = output.contributions()
    assert given.per_tile_CK[0].tolist() == pytest.approx(of_tiles, abs=1e-13)
    constant = aggregator.classifier.bias.item() + sum(W[d] * beta[d] for d in range(5))
    assert given.constant_C.item() == pytest.approx(constant, abs=1e-13)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_features_in_float32_and_many_tiles_lose_nothing_that_shows(layer_norm):
    torch.manual_seed(0)
    aggregator = ClsAttention(64, 2, layer_norm=layer_norm)
    z_KD, r_K = torch.randn(20_000, 64), torch.rand(20_000)
    with torch.no_grad():
        output = aggregator(z_KD, r_K)
        given = output.contributions()
    sums = given.constant_C + given.per_tile_CK.sum(1)
    torch.testing.assert_close(sums, output.logits_C.double(), rtol=0, atol=1e-5)


def test_a_tile_that_is_left_out_takes_just_its_part_away():
    """With weights that are given, not normalised: the logit without tile 2 is the logit less what tile 2 gave."""
    classifier = torch.nn.Linear(3, 1).double()
    values, weights = bag(tiles=5, feature_size=3)
    given = contributions(classifier, torch.nn.Identity(), weights, values)
    without = weights.clone()
    without[2] = 0
    difference = classifier(weights @ values) - classifier(without @ values)
    torch.testing.assert_close(difference, given.per_tile_CK[:, 2])

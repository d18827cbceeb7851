"""The contributions of the tiles and a constant sum to the logit."""

import pytest
import torch
from example_bags import VARIANTS, build_variant, random_bag

from tapfm.aggregators.cls_attention import ClsAttention
from tapfm.aggregators.heads import compute_contributions

NO_CONTRIBUTIONS = {"max"}  # its logits are not sums over tiles


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in NO_CONTRIBUTIONS])
def test_contributions_and_constant_sum_to_the_logit(variant, targets, layer_norm):
    aggregator = build_variant(variant, targets=targets, layer_norm=layer_norm).eval()
    z_KD, r_K = random_bag()
    output = aggregator(z_KD, r_K)
    contributions = output.contributions()
    assert contributions.per_tile_CK.shape == (targets, len(z_KD))
    torch.testing.assert_close(
        contributions.constant_C + contributions.per_tile_CK.sum(1), output.logits_C, rtol=0, atol=1e-12
    )
    assert contributions.per_tile_CK.std(1).min() > 1e-6  # tiles differ


@pytest.mark.parametrize("variant", sorted(NO_CONTRIBUTIONS))
def test_aggregators_without_a_sum_have_no_contributions(variant):
    assert build_variant(variant)(*random_bag()).contributions is None


def test_contribution_without_norm_is_weight_times_tile_logit():
    aggregator = build_variant("cls-attention", targets=2)
    z_KD, r_K = random_bag()
    output = aggregator(z_KD, r_K)
    contributions = output.contributions()
    for i, (weight, z_D) in enumerate(zip(output.tile_weights, z_KD, strict=True)):
        torch.testing.assert_close(contributions.per_tile_CK[:, i], weight * (aggregator.classifier.weight @ z_D))
    torch.testing.assert_close(contributions.constant_C, aggregator.classifier.bias)


def test_contribution_with_layer_norm_matches_the_formula():
    """a_i sum_d W_d gamma_d (z_id - mean(z_i)) / sigma(Z), computed with Python floats."""
    aggregator = build_variant("cls-attention", feature_size=5, targets=1, layer_norm=True)
    z_KD, r_K = random_bag(tiles=4, feature_size=5)
    output = aggregator(z_KD, r_K)
    a, z = output.tile_weights.tolist(), z_KD.tolist()
    W, gamma, beta = (each.tolist() for each in (aggregator.classifier.weight[0], *aggregator.norm.parameters()))
    Z = [sum(a[i] * z[i][d] for i in range(4)) for d in range(5)]
    mean = sum(Z) / 5
    sigma = (sum((each - mean) ** 2 for each in Z) / 5 + aggregator.norm.eps) ** 0.5
    per_tile = [a[i] * sum(W[d] * gamma[d] * (z[i][d] - sum(z[i]) / 5) for d in range(5)) / sigma for i in range(4)]
    contributions = output.contributions()
    assert contributions.per_tile_CK[0].tolist() == pytest.approx(per_tile, abs=1e-13)
    constant = aggregator.classifier.bias.item() + sum(W[d] * beta[d] for d in range(5))
    assert contributions.constant_C.item() == pytest.approx(constant, abs=1e-13)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_contributions_are_precise_for_many_float32_tiles(layer_norm):
    torch.manual_seed(0)
    aggregator = ClsAttention(64, 2, layer_norm=layer_norm)
    z_KD, r_K = torch.randn(20_000, 64), torch.rand(20_000)
    with torch.no_grad():
        output = aggregator(z_KD, r_K)
        contributions = output.contributions()
    sums = contributions.constant_C + contributions.per_tile_CK.sum(1)
    torch.testing.assert_close(sums, output.logits_C.double(), rtol=0, atol=1e-5)


def test_removing_a_tile_changes_the_logit_by_its_contribution():
    """With fixed weights that are not renormalised."""
    classifier = torch.nn.Linear(3, 1).double()
    values, weights = random_bag(tiles=5, feature_size=3)
    contributions = compute_contributions(classifier, torch.nn.Identity(), weights, values)
    without = weights.clone()
    without[2] = 0
    difference = classifier(weights @ values) - classifier(without @ values)
    torch.testing.assert_close(difference, contributions.per_tile_CK[:, 2])

"""VarMIL, compared with its formula."""

import torch
from example_bags import build_variant, random_bag


def test_logits_use_weighted_mean_and_weighted_variance():
    aggregator, (z_KD, r_K) = build_variant("varmil"), random_bag()
    output, projected = aggregator(z_KD, r_K), aggregator.project(z_KD)
    pairs = list(zip(output.tile_weights, projected, strict=True))
    mean = sum(weight * h for weight, h in pairs)
    variance = sum(weight * h * h for weight, h in pairs) - mean * mean
    torch.testing.assert_close(output.logits_C, aggregator.classifier(torch.cat([mean, variance])))


def test_tile_weights_are_those_of_abmil():
    aggregator, abmil, (z_KD, r_K) = build_variant("varmil"), build_variant("abmil"), random_bag()
    for part in ("project", "scores"):
        getattr(abmil, part).load_state_dict(getattr(aggregator, part).state_dict())
    torch.testing.assert_close(aggregator(z_KD, r_K).tile_weights, abmil(z_KD, r_K).tile_weights)


def test_variance_of_equal_tiles_is_zero():
    aggregator, (z_KD, r_K) = build_variant("varmil"), random_bag()
    one, many = (aggregator(z_KD[:1].expand(count, -1), r_K[:count]).logits_C for count in (1, 7))
    torch.testing.assert_close(one, many)

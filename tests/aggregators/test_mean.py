"""The mean of the tiles, and a linear head."""

import torch
from support import randomise

from tapfm.aggregators.mean import MeanPool


def test_logits_are_linear_in_the_mean_tile():
    torch.manual_seed(0)
    z_KD = torch.randn(6, 8)
    aggregator = MeanPool(8, targets=3)
    logits_C, tile_weights = aggregator(z_KD, torch.rand(6))
    mean_D = sum(z_KD) / 6
    torch.testing.assert_close(logits_C, aggregator.classifier.weight @ mean_D + aggregator.classifier.bias)
    assert tile_weights is None


def test_layer_norm_before_the_head_is_a_setting():
    torch.manual_seed(0)
    z_KD = torch.randn(6, 8)
    aggregator = MeanPool(8, layer_norm=True)
    randomise(aggregator)
    normal_D = torch.nn.functional.layer_norm(z_KD.mean(0), (8,), aggregator.norm.weight, aggregator.norm.bias)
    torch.testing.assert_close(aggregator(z_KD, torch.rand(6)).logits_C, aggregator.classifier(normal_D))

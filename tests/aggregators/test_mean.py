"""Mean and max pooling."""

import torch
from support import randomise

from tapfm.aggregators.max import MaxPool
from tapfm.aggregators.mean import MeanPool


def test_logits_are_those_of_the_mean_feature():
    torch.manual_seed(0)
    z_KD = torch.randn(6, 8)
    aggregator = MeanPool(8, targets=3)
    output = aggregator(z_KD, torch.rand(6))
    mean_D = sum(z_KD) / 6
    torch.testing.assert_close(output.logits_C, aggregator.classifier.weight @ mean_D + aggregator.classifier.bias)
    assert output.tile_weights is None


def test_layer_norm_before_the_head():
    torch.manual_seed(0)
    z_KD = torch.randn(6, 8)
    aggregator = MeanPool(8, layer_norm=True)
    randomise(aggregator)
    normalised_D = torch.nn.functional.layer_norm(z_KD.mean(0), (8,), aggregator.norm.weight, aggregator.norm.bias)
    torch.testing.assert_close(aggregator(z_KD, torch.rand(6)).logits_C, aggregator.classifier(normalised_D))


def test_tile_scores_are_logits_of_the_tile_alone():
    torch.manual_seed(0)
    z_KD, r_K = torch.randn(6, 8), torch.rand(6)
    for aggregator in (MeanPool(8, 3), MaxPool(8, 3), MeanPool(8, 3, layer_norm=True), MaxPool(8, 3, layer_norm=True)):
        randomise(aggregator)
        alone = [aggregator(z_KD[i : i + 1], r_K[i : i + 1]).logits_C for i in range(6)]
        torch.testing.assert_close(aggregator(z_KD, r_K).heatmap_scores, torch.stack(alone, 1))


def test_max_is_per_target_and_equal_tiles_share_the_gradient():
    torch.manual_seed(0)
    aggregator = MaxPool(8, targets=3)
    z_KD = torch.randn(6, 8)
    logits_C = aggregator(z_KD, torch.rand(6)).logits_C
    torch.testing.assert_close(logits_C, torch.stack([aggregator.classifier(z_D) for z_D in z_KD]).max(0).values)
    twins = z_KD[:1].repeat(2, 1).requires_grad_()
    aggregator(twins, torch.rand(2)).logits_C.sum().backward()
    torch.testing.assert_close(twins.grad[0], twins.grad[1])

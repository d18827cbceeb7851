"""What holds for every aggregator of the catalogue."""

import pytest
import torch
from support import (
    end_to_end_gradient,
    randomise,
    relative_difference,
    small_encoder,
    some_tiles,
    step_gradient,
    take_step,
)

from tapfm.adaptation.chunked import Chunking
from tapfm.aggregators.catalog import AGGREGATORS, build_aggregator
from tapfm.contracts import Targets
from tapfm.tasks.multilabel import MultiLabelTask

every_aggregator = pytest.mark.parametrize("name", AGGREGATORS)
without_attention = pytest.mark.parametrize(
    "name", [name for name, card in AGGREGATORS.items() if not card.uses_attention]
)


def built(name, feature_size=8, targets=3, **settings):
    torch.manual_seed(0)
    aggregator = build_aggregator(name, feature_size, targets, **settings).double()
    randomise(aggregator)
    return aggregator


def bag(tiles=7, feature_size=8):
    generator = torch.Generator().manual_seed(0)
    z_KD = torch.randn(tiles, feature_size, generator=generator, dtype=torch.float64)
    return z_KD, 1e-3 * torch.rand(tiles, generator=generator, dtype=torch.float64)


@every_aggregator
@pytest.mark.parametrize("targets", [1, 4])
@pytest.mark.parametrize("tiles", [1, 7])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_there_is_a_logit_for_each_target_and_a_weight_for_each_tile(name, targets, tiles, layer_norm):
    logits_C, tile_weights = built(name, targets=targets, layer_norm=layer_norm)(*bag(tiles))
    assert logits_C.shape == (targets,)
    assert logits_C.isfinite().all()
    if tile_weights is not None:
        assert tile_weights.shape[-1] == tiles
        assert tile_weights.sum(-1).tolist() == pytest.approx(1)


@every_aggregator
def test_the_order_of_the_tiles_does_not_matter(name):
    aggregator, (z_KD, r_K) = built(name), bag()
    order = torch.randperm(7, generator=torch.Generator().manual_seed(1))
    logits_C, tile_weights = aggregator(z_KD, r_K)
    shuffled = aggregator(z_KD[order], r_K[order])
    torch.testing.assert_close(shuffled.logits_C, logits_C, rtol=1e-12, atol=1e-12)
    if tile_weights is not None:
        torch.testing.assert_close(shuffled.tile_weights, tile_weights[..., order], rtol=1e-12, atol=1e-12)


@every_aggregator
def test_every_tile_and_every_parameter_gets_a_gradient(name):
    aggregator, (z_KD, r_K) = built(name, layer_norm=True), bag()
    z_KD.requires_grad_()
    aggregator(z_KD, r_K).logits_C.sum().backward()
    assert (z_KD.grad.norm(dim=1) > 0).all()
    for parameter_name, parameter in aggregator.named_parameters():
        assert parameter.grad.norm() > 0, parameter_name


@every_aggregator
def test_the_raw_attention_matters_to_those_that_use_it_and_to_no_other(name):
    aggregator, (z_KD, r_K) = built(name), bag()
    same = torch.equal(aggregator(z_KD, r_K).logits_C, aggregator(z_KD, r_K.flip(0)).logits_C)
    assert same is not AGGREGATORS[name].uses_attention


@every_aggregator
@pytest.mark.parametrize("chunking", [Chunking(), Chunking(2, keep=0)], ids=["one pass", "chunked"])
def test_the_encoders_gradient_is_that_of_end_to_end_backpropagation(name, chunking):
    encoder = small_encoder()
    aggregator, tiles = built(name, encoder.feature_size), some_tiles(encoder)
    task = MultiLabelTask.from_training_labels({"EGFR": [1, 0, 0], "KRAS": [1, 1, 0], "MET": [1, 0, 0]})
    case = {"task": task, "targets": Targets.of([1, None, 0])}
    expected = end_to_end_gradient(encoder, aggregator, tiles, **case)
    assert expected.norm() > 0
    assert relative_difference(step_gradient(encoder, aggregator, tiles, chunking=chunking, **case), expected) < 1e-9


@without_attention
def test_without_the_attention_adaptation_is_plain_fine_tuning(name):
    encoder = small_encoder()
    aggregator, tiles = built(name, encoder.feature_size, targets=1), some_tiles(encoder)
    assert take_step(encoder, aggregator, tiles).norm_g_r == 0
    with_lambda, without = (step_gradient(encoder, aggregator, tiles, lambda_=lambda_) for lambda_ in (1.0, 0.0))
    assert torch.equal(with_lambda, without)

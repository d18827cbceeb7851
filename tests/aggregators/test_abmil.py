"""ABMIL, compared with its formula computed tile by tile."""

import pytest
import torch
from support import randomise

from tapfm.aggregators.abmil import Abmil


def random_abmil(**settings):
    torch.manual_seed(0)
    aggregator = Abmil(8, targets=3, hidden=6, attention=4, **settings).double()
    randomise(aggregator)
    return aggregator, torch.randn(5, 8, dtype=torch.float64), torch.rand(5, dtype=torch.float64)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_weights_and_logits_match_the_formula(gated):
    aggregator, z_KD, r_K = random_abmil(gated=gated)
    W, V = aggregator.project[0], aggregator.scores.content[0]
    hidden, scores = [], []
    for z_D in z_KD:
        h = torch.clamp(W.weight @ z_D + W.bias, min=0)
        gated_h = torch.tanh(V.weight @ h + V.bias)
        if gated:
            U = aggregator.scores.gate[0]
            gated_h = gated_h / (1 + torch.exp(-(U.weight @ h + U.bias)))
        hidden.append(h)
        scores.append(torch.exp(aggregator.scores.score.weight[0] @ gated_h))
    weights = [score / sum(scores) for score in scores]
    bag = sum(weight * h for weight, h in zip(weights, hidden, strict=True))

    logits_C, tile_weights, *_ = aggregator(z_KD, r_K)
    torch.testing.assert_close(tile_weights, torch.stack(weights))
    torch.testing.assert_close(logits_C, aggregator.classifier.weight @ bag + aggregator.classifier.bias)


def test_layer_norm_before_the_head():
    aggregator, z_KD, r_K = random_abmil(layer_norm=True)
    logits_C, tile_weights, *_ = aggregator(z_KD, r_K)
    bag = tile_weights @ aggregator.project(z_KD)
    normalised = torch.nn.functional.layer_norm(bag, (6,), aggregator.norm.weight, aggregator.norm.bias)
    torch.testing.assert_close(logits_C, aggregator.classifier(normalised))


def test_dropout_is_off_by_default_and_in_evaluation_mode():
    _, z_KD, r_K = random_abmil()
    for dropout, training, same in ((0.0, True, True), (0.5, False, True), (0.5, True, False)):
        aggregator = random_abmil(dropout=dropout)[0].train(training)
        first, second = aggregator(z_KD, r_K).logits_C, aggregator(z_KD, r_K).logits_C
        assert torch.equal(first, second) is same

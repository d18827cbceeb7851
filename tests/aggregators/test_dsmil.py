"""DSMIL, compared with its formula. test_agrees_with_torchmil.py has another comparison."""

import math

import torch
from example_bags import THREE_TARGETS, build_variant, random_bag

from tapfm.aggregators.catalog import build_aggregator
from tapfm.tasks.cross_entropy import encode_labels


def test_tile_weights_are_similarities_to_the_critical_tile_of_each_target():
    aggregator, (z_KD, r_K) = build_variant("dsmil"), random_bag()
    output, queries = aggregator(z_KD, r_K), aggregator.query(z_KD)
    instance_logits = aggregator.instance_classifier(z_KD)
    critical = instance_logits.argmax(0).tolist()
    assert len(set(critical)) > 1, "this test needs different critical tiles"
    for target, tile in enumerate(critical):
        similarity = torch.stack([(query * queries[tile]).sum() for query in queries]) / math.sqrt(queries.shape[1])
        weights = similarity.exp() / similarity.exp().sum()
        torch.testing.assert_close(output.tile_weights[target], weights)
        logit = aggregator.classifier.weight[target] @ (weights @ z_KD) + aggregator.classifier.bias[target]
        torch.testing.assert_close(output.logits_C[target], logit)


def test_extra_loss_is_the_weighted_loss_of_the_critical_tiles():
    z_KD, r_K = random_bag()
    targets = encode_labels([1, 0, None])
    for weight, factor in ((0.5, 1.0), (0.2, 0.25), (0.0, 0.0)):
        torch.manual_seed(0)
        aggregator = build_aggregator("dsmil", 8, 3, options={"instance_weight": weight}).double()
        highest = aggregator.instance_classifier(z_KD).amax(0)
        extra = aggregator(z_KD, r_K).extra_loss(THREE_TARGETS, targets)
        torch.testing.assert_close(extra, factor * THREE_TARGETS.loss(highest, targets))

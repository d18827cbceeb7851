"""DSMIL, against its formula written out; that one target of it is torchmil's is tested beside."""

import math

import torch
from bags_of_tiles import THREE_TARGETS, bag, built

from tapfm.aggregators.catalog import build_aggregator
from tapfm.tasks.cross_entropy import encode_labels


def test_each_target_weighs_tiles_by_their_likeness_to_its_own_critical_tile():
    aggregator, (z_KD, r_K) = built("dsmil"), bag()
    output, queries = aggregator(z_KD, r_K), aggregator.query(z_KD)
    of_tiles = aggregator.instance_classifier(z_KD)
    critical = of_tiles.argmax(0).tolist()
    assert len(set(critical)) > 1, "targets must differ for the test to tell them apart"
    for target, tile in enumerate(critical):
        likeness = torch.stack([(query * queries[tile]).sum() for query in queries]) / math.sqrt(queries.shape[1])
        weights = likeness.exp() / likeness.exp().sum()
        torch.testing.assert_close(output.tile_weights[target], weights)
        logit = aggregator.classifier.weight[target] @ (weights @ z_KD) + aggregator.classifier.bias[target]
        torch.testing.assert_close(output.logits_C[target], logit)


def test_the_critical_tiles_have_a_loss_of_their_own():
    z_KD, r_K = bag()
    targets = encode_labels([1, 0, None])
    for weight, share in ((0.5, 1.0), (0.2, 0.25), (0.0, 0.0)):
        torch.manual_seed(0)
        aggregator = build_aggregator("dsmil", 8, 3, options={"instance_weight": weight}).double()
        highest = aggregator.instance_classifier(z_KD).amax(0)
        extra = aggregator(z_KD, r_K).extra_loss(THREE_TARGETS, targets)
        torch.testing.assert_close(extra, share * THREE_TARGETS.loss(highest, targets))

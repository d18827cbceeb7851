"""CLAM: its branches and the loss of its tiles, written out; that one branch is torchmil's is tested beside."""

import pytest
import torch
from bags_of_tiles import THREE_TARGETS, bag, built

from tapfm.aggregators.abmil import Abmil
from tapfm.aggregators.clam import Clam
from tapfm.tasks.cross_entropy import encode_labels


def test_a_single_branch_pools_as_abmil_does():
    aggregator, abmil, (z_KD, r_K) = built("clam"), built("abmil"), bag()
    for part in ("project", "scores", "classifier"):
        getattr(abmil, part).load_state_dict(getattr(aggregator, part).state_dict())
    ours, theirs = aggregator(z_KD, r_K), abmil(z_KD, r_K)
    torch.testing.assert_close(ours.logits_C, theirs.logits_C)
    torch.testing.assert_close(ours.tile_weights, theirs.tile_weights)


def test_of_several_branches_each_is_abmil_with_the_attention_of_its_target():
    aggregator, (z_KD, r_K) = built("clam, multi"), bag()
    output = aggregator(z_KD, r_K)
    assert output.tile_weights.shape == (3, 7)
    for target in range(3):
        one = Abmil(8, 3).double()
        state = aggregator.state_dict() | {"scores.score.weight": aggregator.scores.score.weight[target : target + 1]}
        one.load_state_dict({name: each for name, each in state.items() if not name.startswith("instance")})
        alone = one(z_KD, r_K)
        torch.testing.assert_close(output.tile_weights[target], alone.tile_weights)
        torch.testing.assert_close(output.logits_C[target], alone.logits_C[target])


def instance_loss_by_hand(aggregator, z_KD, r_K, labels, count):
    """Tile by tile and target by target, as the paper of CLAM has it."""
    projected = aggregator.project(z_KD)
    weights = aggregator(z_KD, r_K).tile_weights.expand(3, -1)
    classifiers = aggregator.instance_classifiers.weight.view(3, 2, 2, -1)
    biases = aggregator.instance_classifiers.bias.view(3, 2, 2)
    loss = 0
    for target, label in enumerate(labels):
        if label is None:
            continue

        def said(tile, slides, target=target):
            return classifiers[target, slides] @ projected[tile] + biases[target, slides]

        def svm(logits, which):
            wrong = logits[1 - which] + aggregator.margin
            return torch.log(torch.exp(wrong) + torch.exp(logits[which])) - logits[which]

        order = weights[target].argsort(descending=True).tolist()
        high, low = order[:count], order[-count:]
        inside = [svm(said(tile, label), 1) for tile in high] + [svm(said(tile, label), 0) for tile in low]
        outside = [svm(said(tile, 1 - label), 0) for tile in high]
        loss = loss + (sum(inside) / (2 * count) + sum(outside) / count) / 2  # the mean of its two classifiers
    return loss


@pytest.mark.parametrize("branches", ["single", "multi"])
@pytest.mark.parametrize("margin", [0.0, 1.0])
@pytest.mark.parametrize("labels", [[1, 0, 1], [0, None, 1]])
def test_the_loss_of_the_tiles_is_that_of_the_formula(branches, margin, labels):
    torch.manual_seed(0)
    aggregator = Clam(8, 3, hidden=6, attention=4, branches=branches, instances=2, margin=margin).double()
    z_KD, r_K = bag()
    expected = instance_loss_by_hand(aggregator, z_KD, r_K, labels, 2)
    extra = aggregator(z_KD, r_K).extra_loss(THREE_TARGETS, encode_labels(labels))
    torch.testing.assert_close(extra, 0.3 / 0.7 * expected)


def test_a_slide_of_few_tiles_uses_them_all():
    aggregator, (z_KD, r_K) = built("clam"), bag(3)
    assert aggregator.instances > 3
    expected = instance_loss_by_hand(aggregator, z_KD, r_K, [1, 1, 0], 3)
    extra = aggregator(z_KD, r_K).extra_loss(THREE_TARGETS, encode_labels([1, 1, 0]))
    torch.testing.assert_close(extra, 0.3 / 0.7 * expected)

"""CLAM: branches and instance loss, compared with the formula. test_agrees_with_torchmil.py has another comparison."""

import pytest
import torch
from example_bags import THREE_TARGETS, build_variant, random_bag

from tapfm.aggregators.abmil import Abmil
from tapfm.aggregators.clam import Clam
from tapfm.tasks.cross_entropy import encode_labels


def test_single_branch_has_weights_and_logits_of_abmil():
    aggregator, abmil, (z_KD, r_K) = build_variant("clam"), build_variant("abmil"), random_bag()
    for part in ("project", "scores", "classifier"):
        getattr(abmil, part).load_state_dict(getattr(aggregator, part).state_dict())
    ours, theirs = aggregator(z_KD, r_K), abmil(z_KD, r_K)
    torch.testing.assert_close(ours.logits_C, theirs.logits_C)
    torch.testing.assert_close(ours.tile_weights, theirs.tile_weights)


def test_each_of_several_branches_is_an_abmil_with_its_own_attention():
    aggregator, (z_KD, r_K) = build_variant("clam, multi"), random_bag()
    output = aggregator(z_KD, r_K)
    assert output.tile_weights.shape == (3, 7)
    for target in range(3):
        single = Abmil(8, 3).double()
        state = aggregator.state_dict() | {"scores.score.weight": aggregator.scores.score.weight[target : target + 1]}
        single.load_state_dict({name: each for name, each in state.items() if not name.startswith("instance")})
        expected = single(z_KD, r_K)
        torch.testing.assert_close(output.tile_weights[target], expected.tile_weights)
        torch.testing.assert_close(output.logits_C[target], expected.logits_C[target])


def compute_instance_loss(aggregator, z_KD, r_K, labels, count):
    """Compute the loss tile by tile and target by target, as in the CLAM paper."""
    projected = aggregator.project(z_KD)
    weights = aggregator(z_KD, r_K).tile_weights.expand(3, -1)
    classifiers = aggregator.instance_classifiers.weight.view(3, 2, 2, -1)
    biases = aggregator.instance_classifiers.bias.view(3, 2, 2)
    loss = 0
    for target, label in enumerate(labels):
        if label is None:
            continue

        def tile_logits(tile, label, target=target):
            return classifiers[target, label] @ projected[tile] + biases[target, label]

        def svm_loss(logits, tile_class):
            wrong = logits[1 - tile_class] + aggregator.margin
            return torch.log(torch.exp(wrong) + torch.exp(logits[tile_class])) - logits[tile_class]

        order = weights[target].argsort(descending=True).tolist()
        high, low = order[:count], order[-count:]
        label_losses = [svm_loss(tile_logits(tile, label), 1) for tile in high] + [
            svm_loss(tile_logits(tile, label), 0) for tile in low
        ]
        other_losses = [svm_loss(tile_logits(tile, 1 - label), 0) for tile in high]
        loss = loss + (sum(label_losses) / (2 * count) + sum(other_losses) / count) / 2  # mean of the two classifiers
    return loss


@pytest.mark.parametrize("branches", ["single", "multi"])
@pytest.mark.parametrize("margin", [0.0, 1.0])
@pytest.mark.parametrize("labels", [[1, 0, 1], [0, None, 1]])
def test_instance_loss_matches_the_formula(branches, margin, labels):
    torch.manual_seed(0)
    aggregator = Clam(8, 3, hidden=6, attention=4, branches=branches, instances=2, margin=margin).double()
    z_KD, r_K = random_bag()
    expected = compute_instance_loss(aggregator, z_KD, r_K, labels, 2)
    extra = aggregator(z_KD, r_K).extra_loss(THREE_TARGETS, encode_labels(labels))
    torch.testing.assert_close(extra, 0.3 / 0.7 * expected)


def test_instance_loss_of_slide_with_few_tiles_uses_all_tiles():
    aggregator, (z_KD, r_K) = build_variant("clam"), random_bag(3)
    assert aggregator.instances > 3
    expected = compute_instance_loss(aggregator, z_KD, r_K, [1, 1, 0], 3)
    extra = aggregator(z_KD, r_K).extra_loss(THREE_TARGETS, encode_labels([1, 1, 0]))
    torch.testing.assert_close(extra, 0.3 / 0.7 * expected)

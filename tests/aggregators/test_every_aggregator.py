"""Properties of every aggregator of the catalogue."""

import pytest
import torch
from example_bags import THREE_TARGETS, VARIANTS, build_variant, random_bag
from support import (
    end_to_end_gradient,
    random_tiles,
    relative_difference,
    small_encoder,
    step_gradient,
    take_step,
    total_loss,
)

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.learner import Learner, OptimiserSettings
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.aggregators.catalog import AGGREGATORS, build_aggregator
from tapfm.contracts import EncodedTiles, Targets
from tapfm.inference.bags import Bag
from tapfm.runs.model import SlideModel
from tapfm.tasks.cross_entropy import encode_labels

every_aggregator = pytest.mark.parametrize("variant", VARIANTS)
without_attention = pytest.mark.parametrize(
    "variant", [variant for variant, (name, _) in VARIANTS.items() if not AGGREGATORS[name].uses_raw_attention]
)
LABELS = encode_labels([1, None, 0])


@every_aggregator
@pytest.mark.parametrize("targets", [1, 4])
@pytest.mark.parametrize("tiles", [1, 7])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_output_has_a_logit_per_target_and_a_score_per_tile(variant, targets, tiles, layer_norm):
    output = build_variant(variant, targets=targets, layer_norm=layer_norm)(*random_bag(tiles))
    assert output.logits_C.shape == (targets,)
    assert output.logits_C.isfinite().all()
    assert output.heatmap_scores.shape in {(tiles,), (targets, tiles)}
    assert output.heatmap_scores.isfinite().all()
    if output.tile_weights is not None:
        torch.testing.assert_close(output.tile_weights.sum(-1), torch.ones_like(output.tile_weights[..., 0]))


@every_aggregator
def test_order_of_tiles_does_not_matter(variant):
    aggregator, (z_KD, r_K) = build_variant(variant), random_bag(20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    output, shuffled = aggregator(z_KD, r_K), aggregator(z_KD[order], r_K[order])
    exact = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(shuffled.logits_C, output.logits_C, **exact)
    torch.testing.assert_close(shuffled.heatmap_scores, output.heatmap_scores[..., order], **exact)
    losses = (total_loss(each, THREE_TARGETS, LABELS) for each in (shuffled, output))
    torch.testing.assert_close(*losses, **exact)


@every_aggregator
@pytest.mark.parametrize("tiles", [1, 7])
def test_gradients_are_finite_and_reach_every_parameter(variant, tiles):
    aggregator, (z_KD, r_K) = build_variant(variant, layer_norm=True), random_bag(tiles)
    z_KD.requires_grad_()
    for labels in ([1, 0, 1], [0, 1, 0]):
        total_loss(aggregator(z_KD, r_K), THREE_TARGETS, encode_labels(labels)).backward()
    assert z_KD.grad.isfinite().all()
    for name, parameter in aggregator.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # the weight of a single tile is 1, whatever its score
        assert tiles == 1 or parameter.grad.norm() > 0, name


@every_aggregator
def test_every_tile_gets_a_gradient_except_with_max(variant):
    aggregator, (z_KD, r_K) = build_variant(variant, targets=1), random_bag()
    z_KD.requires_grad_()
    aggregator(z_KD, r_K).logits_C.sum().backward()
    tiles_with_gradient = (z_KD.grad.norm(dim=1) > 0).sum()
    assert tiles_with_gradient == (1 if variant == "max" else 7)


@every_aggregator
def test_logits_depend_on_raw_attention_only_if_the_card_says_so(variant):
    aggregator, (z_KD, r_K) = build_variant(variant), random_bag()
    same = torch.equal(aggregator(z_KD, r_K).logits_C, aggregator(z_KD, r_K.flip(0)).logits_C)
    assert same is not AGGREGATORS[VARIANTS[variant][0]].uses_raw_attention


@every_aggregator
@pytest.mark.parametrize("chunking", [Chunking(), Chunking(2, keep_graphs=0)], ids=["one pass", "chunked"])
def test_encoder_gradient_equals_end_to_end_backpropagation(variant, chunking):
    encoder = small_encoder()
    aggregator, tiles = build_variant(variant, encoder.feature_size), random_tiles(encoder)
    case = {"task": THREE_TARGETS, "targets": LABELS}
    expected = end_to_end_gradient(encoder, aggregator, tiles, **case)
    assert expected.norm() > 0
    assert relative_difference(step_gradient(encoder, aggregator, tiles, chunking=chunking, **case), expected) < 1e-9


@every_aggregator
def test_missing_label_does_not_affect_any_loss(variant):
    aggregator, (z_KD, r_K) = build_variant(variant), random_bag()
    known = torch.tensor([True, False, True])
    losses, gradients = [], []
    for placeholder in (0.0, 1.0):
        aggregator.zero_grad()
        leaf = z_KD.clone().requires_grad_()
        targets = Targets(torch.tensor([1.0, placeholder, 0.0]), known)
        loss = total_loss(aggregator(leaf, r_K), THREE_TARGETS, targets)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(leaf.grad)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)
    none_known = Targets(torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    assert total_loss(aggregator(z_KD, r_K), THREE_TARGETS, none_known) == 0


@every_aggregator
def test_reported_loss_is_that_of_the_task(variant):
    encoder = small_encoder()
    aggregator, tiles = build_variant(variant, encoder.feature_size), random_tiles(encoder)
    report = take_step(encoder, aggregator, tiles, task=THREE_TARGETS, targets=LABELS)
    expected = THREE_TARGETS.loss(aggregator(*encoder(tiles)).logits_C, LABELS)
    torch.testing.assert_close(report.loss_agg, expected.detach())


@without_attention
def test_lambda_has_no_effect_without_raw_attention(variant):
    encoder = small_encoder()
    aggregator, tiles = build_variant(variant, encoder.feature_size, targets=1), random_tiles(encoder)
    assert take_step(encoder, aggregator, tiles).norm_g_r == 0
    with_lambda, without = (step_gradient(encoder, aggregator, tiles, lambda_=lambda_) for lambda_ in (1.0, 0.0))
    assert torch.equal(with_lambda, without)


@every_aggregator
@pytest.mark.parametrize("method", ["fixed", "finetune"])
def test_loss_of_a_slide_decreases(variant, method):
    encoder = small_encoder()
    tiles = random_tiles(encoder)
    aggregator = build_variant(variant, encoder.feature_size)
    model = SlideModel(None if method == "fixed" else encoder, aggregator, THREE_TARGETS)
    optimisation = OptimiserSettings(encoder_lr=1e-4, aggregator_lr=1e-3)
    learner = Learner(model, AdaptationSettings(lambda_=0.0, chunking=Chunking(2, keep_graphs=0)), optimisation)
    learner.start_epoch(0)
    content = EncodedTiles(*(each.detach() for each in encoder(tiles))) if method == "fixed" else tiles
    losses = [
        learner.train_step(Bag(content, torch.arange(5).numpy()), LABELS, update=True, slide_id="s").loss_agg
        for _ in range(8)
    ]
    assert losses[-1] < losses[0]


@every_aggregator
def test_parameters_are_the_whole_state(variant):
    name, options = VARIANTS[variant]
    aggregator = build_variant(variant, layer_norm=True)
    again = build_aggregator(name, 8, 3, layer_norm=True, options=options).double()
    again.load_state_dict(dict(aggregator.named_parameters()))  # no buffers
    assert torch.equal(again(*random_bag()).logits_C, aggregator(*random_bag()).logits_C)

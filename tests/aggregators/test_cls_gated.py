"""cls-gated: it starts as cls-attention, its gate is trained, and the raw attention always has a gradient."""

import pytest
import torch
from example_bags import THREE_TARGETS, build_variant, random_bag
from support import (
    TASK,
    end_to_end_gradient,
    random_tiles,
    relative_difference,
    small_encoder,
    step_gradient,
    take_step,
)

from tapfm.aggregators.catalog import build_aggregator
from tapfm.aggregators.cls_attention import compute_tile_weights
from tapfm.aggregators.cls_gated import ClsGated
from tapfm.errors import SettingError
from tapfm.tasks.cross_entropy import encode_labels


def build_untrained(name, feature_size, targets, *, seed=0, dtype=torch.float64, **settings):
    torch.manual_seed(seed)
    return build_aggregator(name, feature_size, targets, **settings).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("tiles", "targets", "size"), [(1, 1, 8), (7, 1, 8), (13, 4, 24), (301, 3, 385)])
@pytest.mark.parametrize("settings", [{}, {"tau": 0.1, "layer_norm": True}], ids=str)
def test_untrained_output_is_bit_identical_to_cls_attention(dtype, tiles, targets, size, settings):
    z_KD, r_K = (each.to(dtype) for each in random_bag(tiles, size))
    gated, plain = (
        build_untrained(name, size, targets, dtype=dtype, **settings) for name in ("cls-gated", "cls-attention")
    )
    ours, theirs = gated(z_KD, r_K), plain(z_KD, r_K)
    assert torch.equal(ours.logits_C, theirs.logits_C), "with one seed both have the same classifier"
    assert torch.equal(ours.tile_weights, theirs.tile_weights.expand(targets, -1))


@pytest.mark.parametrize("lambda_", [0.0, 1.0])
def test_first_encoder_gradient_equals_that_of_cls_attention(lambda_):
    encoder = small_encoder()
    tiles, case = random_tiles(encoder), {"task": THREE_TARGETS, "targets": encode_labels([1, None, 0])}
    gated, plain = (
        step_gradient(encoder, build_untrained(name, encoder.feature_size, 3), tiles, lambda_=lambda_, **case)
        for name in ("cls-gated", "cls-attention")
    )
    assert relative_difference(gated, plain) < 1e-12


def test_trained_gate_matches_the_formula():
    aggregator, (z_KD, r_K) = build_variant("cls-gated"), random_bag()
    V, U, w = aggregator.gates.content[0], aggregator.gates.gate[0], aggregator.gates.score.weight
    scaled = (r_K - r_K.min()) / (r_K.max() - r_K.min())
    output = aggregator(z_KD, r_K)
    for target in range(3):
        scores = []
        for z_D, prior in zip(z_KD, scaled, strict=True):
            x_D = (z_D - z_D.mean()) / (z_D.var(correction=0) + 1e-5).sqrt()
            gated_x = torch.tanh(V.weight @ x_D + V.bias) / (1 + torch.exp(-(U.weight @ x_D + U.bias)))
            scores.append(torch.exp(prior + w[target] @ gated_x))
        weights = torch.stack(scores) / sum(scores)
        torch.testing.assert_close(output.tile_weights[target], weights)
        bag_D = sum(a * z_D for a, z_D in zip(weights, z_KD, strict=True))
        expected = aggregator.classifier.weight[target] @ bag_D + aggregator.classifier.bias[target]
        torch.testing.assert_close(output.logits_C[target], expected)
    assert not torch.allclose(output.tile_weights[0], output.tile_weights[1]), "targets have different tile weights"


def test_logits_are_sums_over_tiles():
    aggregator, (z_KD, r_K) = build_variant("cls-gated"), random_bag()
    output = aggregator(z_KD, r_K)
    contributions = output.tile_weights * (aggregator.classifier.weight @ z_KD.T)
    torch.testing.assert_close(contributions.sum(1) + aggregator.classifier.bias, output.logits_C)


def test_gradient_of_raw_attention_matches_finite_differences():
    aggregator, (z_KD, r_K) = build_variant("cls-gated"), random_bag()
    leaf, targets = r_K.clone().requires_grad_(), encode_labels([1, 0, None])

    def loss_at(attention):
        return THREE_TARGETS.loss(aggregator(z_KD, attention).logits_C, targets)

    (gradient,) = torch.autograd.grad(loss_at(leaf), leaf)
    # includes the smallest and largest attention, which set the scale of min-max
    step = 1e-9
    for tile in range(7):
        change = torch.zeros_like(r_K)
        change[tile] = step
        numeric = (loss_at(r_K + change) - loss_at(r_K - change)) / (2 * step)
        assert gradient[tile].item() == pytest.approx(numeric.item(), rel=1e-4, abs=1e-4 * gradient.norm().item())
    assert (gradient.abs() > 1e-3 * gradient.norm()).sum() >= 5


def test_raw_attention_has_a_gradient_with_a_trained_gate():
    encoder = small_encoder()
    aggregator, tiles = build_variant("cls-gated", encoder.feature_size, targets=1), random_tiles(encoder)
    assert take_step(encoder, aggregator, tiles).norm_g_r > 0
    whole, held = (end_to_end_gradient(encoder, aggregator, tiles, hold_attention=hold) for hold in (False, True))
    assert relative_difference(step_gradient(encoder, aggregator, tiles), whole) < 1e-9
    assert relative_difference(step_gradient(encoder, aggregator, tiles, lambda_=0.0), held) < 1e-9
    assert relative_difference(whole, held) > 1e-6, "without an attention term this test would check nothing"


def test_logged_attention_loss_matches_eq_6():
    encoder = small_encoder()
    aggregator, tiles = build_variant("cls-gated", encoder.feature_size, targets=1), random_tiles(encoder)
    report = take_step(encoder, aggregator, tiles)
    z_KD, r_K = (each.detach() for each in encoder(tiles))
    output = aggregator(z_KD, r_K)
    g_logit = (output.logits_C.sigmoid() - 1) * TASK.weights.positive
    g_a = g_logit[:, None] * (aggregator.classifier.weight @ z_KD.T)
    torch.testing.assert_close(report.loss_attention, (output.tile_weights * g_a).sum().detach())


@pytest.mark.parametrize("attention", [[0.004], [0.004] * 6], ids=["K=1", "equal"])
def test_with_equal_attentions_only_the_gate_sets_the_weights(attention):
    aggregator, r_K = build_variant("cls-gated"), torch.tensor(attention, dtype=torch.float64, requires_grad=True)
    z_KD, _ = random_bag(len(attention))
    output = aggregator(z_KD, r_K)
    x_KD = torch.nn.functional.layer_norm(z_KD, (8,))
    torch.testing.assert_close(output.tile_weights, aggregator.gates(x_KD).softmax(1))
    (gradient,) = torch.autograd.grad(output.logits_C.sum(), r_K)
    assert gradient.tolist() == [0] * len(attention)
    untrained = build_untrained("cls-gated", 8, 3)(z_KD, r_K).tile_weights
    torch.testing.assert_close(untrained, compute_tile_weights(r_K).expand(3, -1))


def test_first_step_updates_the_gate():
    encoder = small_encoder()
    aggregator, tiles = build_untrained("cls-gated", encoder.feature_size, 1), random_tiles(encoder)
    optimizer = torch.optim.SGD(aggregator.parameters(), lr=0.1)
    take_step(encoder, aggregator, tiles, update_aggregator=optimizer.step)
    assert aggregator.gates.score.weight.norm() > 0


def test_gate_does_not_depend_on_the_scale_of_features():
    aggregator, (z_KD, r_K) = build_variant("cls-gated"), random_bag()
    weights, scaled_weights = (aggregator(scale * z_KD, r_K).tile_weights for scale in (1, 30))
    torch.testing.assert_close(weights, scaled_weights, rtol=1e-4, atol=1e-6)


def test_dropout_affects_only_the_gate():
    z_KD, r_K = random_bag()
    torch.manual_seed(0)
    aggregator = ClsGated(8, dropout=0.5).double()
    plain = aggregator(z_KD, r_K).logits_C
    assert torch.equal(plain, aggregator(z_KD, r_K).logits_C), "w is initialised to 0"
    torch.nn.init.ones_(aggregator.gates.score.weight)
    assert not torch.equal(aggregator(z_KD, r_K).logits_C, aggregator(z_KD, r_K).logits_C)
    aggregator.eval()
    assert torch.equal(aggregator(z_KD, r_K).logits_C, aggregator(z_KD, r_K).logits_C)


def test_tau_must_be_positive():
    with pytest.raises(SettingError, match="tau must be positive"):
        ClsGated(8, tau=0)

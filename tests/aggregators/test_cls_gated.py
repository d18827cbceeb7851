"""cls-gated: it starts as cls-attention, its gate learns, and the attention stays in every gradient."""

import pytest
import torch
from bags_of_tiles import THREE_TARGETS, bag, built
from support import TASK, end_to_end_gradient, relative_difference, small_encoder, some_tiles, step_gradient, take_step

from tapfm.aggregators.catalog import build_aggregator
from tapfm.aggregators.cls_attention import tile_weights
from tapfm.aggregators.cls_gated import ClsGated
from tapfm.errors import SettingError
from tapfm.tasks.cross_entropy import encode_labels


def fresh(name, feature_size, targets, *, seed=0, dtype=torch.float64, **settings):
    torch.manual_seed(seed)
    return build_aggregator(name, feature_size, targets, **settings).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("tiles", "targets", "size"), [(1, 1, 8), (7, 1, 8), (13, 4, 24), (301, 3, 385)])
@pytest.mark.parametrize("settings", [{}, {"tau": 0.1, "layer_norm": True}], ids=str)
def test_it_starts_as_cls_attention_bit_for_bit(dtype, tiles, targets, size, settings):
    z_KD, r_K = (each.to(dtype) for each in bag(tiles, size))
    gated, plain = (fresh(name, size, targets, dtype=dtype, **settings) for name in ("cls-gated", "cls-attention"))
    ours, theirs = gated(z_KD, r_K), plain(z_KD, r_K)
    assert torch.equal(ours.logits_C, theirs.logits_C), "a seed gives both the same classifier"
    assert torch.equal(ours.tile_weights, theirs.tile_weights.expand(targets, -1))


@pytest.mark.parametrize("lambda_", [0.0, 1.0])
def test_the_encoders_first_gradient_is_that_of_cls_attention(lambda_):
    encoder = small_encoder()
    tiles, case = some_tiles(encoder), {"task": THREE_TARGETS, "targets": encode_labels([1, None, 0])}
    gated, plain = (
        step_gradient(encoder, fresh(name, encoder.feature_size, 3), tiles, lambda_=lambda_, **case)
        for name in ("cls-gated", "cls-attention")
    )
    assert relative_difference(gated, plain) < 1e-12


def test_a_gate_that_has_learnt_is_that_of_the_formula():
    aggregator, (z_KD, r_K) = built("cls-gated"), bag()
    V, U, w = aggregator.gates.content[0], aggregator.gates.gate[0], aggregator.gates.score.weight
    scaled = (r_K - r_K.min()) / (r_K.max() - r_K.min())
    output = aggregator(z_KD, r_K)
    for target in range(3):
        scores = []
        for z_D, prior in zip(z_KD, scaled, strict=True):
            x_D = (z_D - z_D.mean()) / (z_D.var(correction=0) + 1e-5).sqrt()
            seen = torch.tanh(V.weight @ x_D + V.bias) / (1 + torch.exp(-(U.weight @ x_D + U.bias)))
            scores.append(torch.exp(prior + w[target] @ seen))
        weights = torch.stack(scores) / sum(scores)
        torch.testing.assert_close(output.tile_weights[target], weights)
        bag_D = sum(a * z_D for a, z_D in zip(weights, z_KD, strict=True))
        expected = aggregator.classifier.weight[target] @ bag_D + aggregator.classifier.bias[target]
        torch.testing.assert_close(output.logits_C[target], expected)
    assert not torch.allclose(output.tile_weights[0], output.tile_weights[1]), "targets look at different tiles"


def test_the_logits_are_sums_over_tiles():
    """Exact attribution: what each tile gives to each target."""
    aggregator, (z_KD, r_K) = built("cls-gated"), bag()
    output = aggregator(z_KD, r_K)
    given = output.tile_weights * (aggregator.classifier.weight @ z_KD.T)
    torch.testing.assert_close(given.sum(1) + aggregator.classifier.bias, output.logits_C)


def test_the_gradient_at_the_attention_is_right_by_finite_differences():
    aggregator, (z_KD, r_K) = built("cls-gated"), bag()
    leaf, targets = r_K.clone().requires_grad_(), encode_labels([1, 0, None])

    def loss_at(attention):
        return THREE_TARGETS.loss(aggregator(z_KD, attention).logits_C, targets)

    (gradient,) = torch.autograd.grad(loss_at(leaf), leaf)
    # the extremes too: they set the scale of min-max
    step = 1e-9
    for tile in range(7):
        change = torch.zeros_like(r_K)
        change[tile] = step
        numeric = (loss_at(r_K + change) - loss_at(r_K - change)) / (2 * step)
        assert gradient[tile].item() == pytest.approx(numeric.item(), rel=1e-4, abs=1e-4 * gradient.norm().item())
    assert (gradient.abs() > 1e-3 * gradient.norm()).sum() >= 5


def test_the_encoder_learns_where_to_look_however_much_the_gate_has_learnt():
    encoder = small_encoder()
    aggregator, tiles = built("cls-gated", encoder.feature_size, targets=1), some_tiles(encoder)
    assert take_step(encoder, aggregator, tiles).norm_g_r > 0
    whole, held = (end_to_end_gradient(encoder, aggregator, tiles, hold_attention=hold) for hold in (False, True))
    assert relative_difference(step_gradient(encoder, aggregator, tiles), whole) < 1e-9
    assert relative_difference(step_gradient(encoder, aggregator, tiles, lambda_=0.0), held) < 1e-9
    assert relative_difference(whole, held) > 1e-6, "the attention term must be there for the test to see it"


def test_the_logged_attention_loss_is_that_of_eq_6_over_all_targets():
    encoder = small_encoder()
    aggregator, tiles = built("cls-gated", encoder.feature_size, targets=1), some_tiles(encoder)
    report = take_step(encoder, aggregator, tiles)
    z_KD, r_K = (each.detach() for each in encoder(tiles))
    output = aggregator(z_KD, r_K)
    g_logit = (output.logits_C.sigmoid() - 1) * TASK.weights.positive
    g_a = g_logit[:, None] * (aggregator.classifier.weight @ z_KD.T)
    torch.testing.assert_close(report.loss_attention, (output.tile_weights * g_a).sum().detach())


@pytest.mark.parametrize("attention", [[0.004], [0.004] * 6], ids=["K=1", "equal"])
def test_where_the_attention_says_nothing_the_gate_alone_decides(attention):
    aggregator, r_K = built("cls-gated"), torch.tensor(attention, dtype=torch.float64, requires_grad=True)
    z_KD, _ = bag(len(attention))
    output = aggregator(z_KD, r_K)
    x_KD = torch.nn.functional.layer_norm(z_KD, (8,))
    torch.testing.assert_close(output.tile_weights, aggregator.gates(x_KD).softmax(1))
    (gradient,) = torch.autograd.grad(output.logits_C.sum(), r_K)
    assert gradient.tolist() == [0] * len(attention)
    start = fresh("cls-gated", 8, 3)(z_KD, r_K).tile_weights
    torch.testing.assert_close(start, tile_weights(r_K).expand(3, -1))


def test_the_gate_learns_from_its_first_step():
    encoder = small_encoder()
    aggregator, tiles = fresh("cls-gated", encoder.feature_size, 1), some_tiles(encoder)
    optimizer = torch.optim.SGD(aggregator.parameters(), lr=0.1)
    take_step(encoder, aggregator, tiles, update_aggregator=optimizer.step)
    assert aggregator.gates.score.weight.norm() > 0


def test_features_of_any_scale_give_the_gate_the_same_to_see():
    aggregator, (z_KD, r_K) = built("cls-gated"), bag()
    weights, of_longer = (aggregator(scale * z_KD, r_K).tile_weights for scale in (1, 30))
    torch.testing.assert_close(weights, of_longer, rtol=1e-4, atol=1e-6)


def test_dropout_changes_the_gate_and_not_what_is_summed():
    z_KD, r_K = bag()
    torch.manual_seed(0)
    aggregator = ClsGated(8, dropout=0.5).double()
    plain = aggregator(z_KD, r_K).logits_C
    assert torch.equal(plain, aggregator(z_KD, r_K).logits_C), "w is 0 yet"
    torch.nn.init.ones_(aggregator.gates.score.weight)
    assert not torch.equal(aggregator(z_KD, r_K).logits_C, aggregator(z_KD, r_K).logits_C)
    aggregator.eval()
    assert torch.equal(aggregator(z_KD, r_K).logits_C, aggregator(z_KD, r_K).logits_C)


def test_tau_must_be_positive():
    with pytest.raises(SettingError, match="tau must be positive"):
        ClsGated(8, tau=0)

"""Eqs. 2-3: tile weights, the bag's feature and its logits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tapfm.aggregators.cls_attention import ClsAttention, compute_tile_weights
from tapfm.errors import SettingError

attentions = st.lists(st.floats(1e-4, 1e-2), min_size=1, max_size=40)


@given(attentions, st.floats(0.05, 5))
def test_weights_are_positive_and_sum_to_one(values, tau):
    a_K = compute_tile_weights(torch.tensor(values, dtype=torch.float64), tau)
    assert (a_K > 0).all()
    assert a_K.sum().item() == pytest.approx(1, abs=1e-12)


def test_weights_are_softmax_of_minmax():
    r_K = torch.tensor([0.001, 0.003, 0.002], dtype=torch.float64)
    expected = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64).softmax(0)
    torch.testing.assert_close(compute_tile_weights(r_K), expected)
    sharper = (torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64) / 0.1).softmax(0)
    torch.testing.assert_close(compute_tile_weights(r_K, tau=0.1), sharper)


@pytest.mark.parametrize(
    "values", [[0.004], [0.004] * 6, [0.004, 0.004 * (1 + 1e-9), 0.004]], ids=["K=1", "equal", "equal up to rounding"]
)
def test_equal_attentions_give_uniform_weights_and_no_gradient(values):
    r_K = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    a_K = compute_tile_weights(r_K)
    torch.testing.assert_close(a_K, torch.full_like(a_K, 1 / len(values)))
    (gradient,) = torch.autograd.grad((a_K * torch.arange(len(values))).sum(), r_K)
    assert gradient.tolist() == [0] * len(values)


def test_two_tiles_have_no_attention_gradient():
    r_K = torch.tensor([0.001, 0.003], dtype=torch.float64, requires_grad=True)
    a_K = compute_tile_weights(r_K)
    torch.testing.assert_close(a_K, torch.tensor([0.0, 1.0], dtype=torch.float64).softmax(0))
    (gradient,) = torch.autograd.grad((a_K * torch.tensor([1.0, 5.0])).sum(), r_K)
    assert gradient.abs().max() < 1e-9


def test_tied_extremes_share_their_gradient():
    r_K = torch.tensor([0.001, 0.003, 0.003, 0.001, 0.002], dtype=torch.float64, requires_grad=True)
    upstream = torch.tensor([1.0, 2.0, 2.0, 1.0, 5.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((compute_tile_weights(r_K) * upstream).sum(), r_K)
    torch.testing.assert_close(gradient[0], gradient[3])
    torch.testing.assert_close(gradient[1], gradient[2])
    assert gradient.sum().abs() < 1e-12, "a constant offset does not change the weights"
    assert (r_K * gradient).sum().abs() < 1e-12, "a constant factor does not change the weights"


def test_logits_are_linear_in_the_weighted_sum_of_features():
    torch.manual_seed(0)
    z_KD, r_K = torch.randn(6, 8), torch.rand(6) * 1e-3
    aggregator = ClsAttention(8, targets=3)
    logits_C, a_K, *_ = aggregator(z_KD, r_K)
    bag_D = sum(a * z for a, z in zip(a_K, z_KD, strict=True))
    torch.testing.assert_close(logits_C, aggregator.classifier.weight @ bag_D + aggregator.classifier.bias)


def test_layer_norm_before_the_classifier():
    torch.manual_seed(0)
    z_KD, r_K = torch.randn(6, 8), torch.rand(6)
    aggregator = ClsAttention(8, layer_norm=True)
    bag_D = compute_tile_weights(r_K) @ z_KD
    expected = aggregator.classifier(torch.nn.functional.layer_norm(bag_D, (8,)))
    torch.testing.assert_close(aggregator(z_KD, r_K).logits_C, expected)


def test_tau_must_be_positive():
    for tau in (0, -1, float("nan")):
        with pytest.raises(SettingError, match="tau must be positive"):
            ClsAttention(8, tau=tau)

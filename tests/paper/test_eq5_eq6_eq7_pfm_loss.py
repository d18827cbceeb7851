"""Eqs. 5-7: the loss of the encoder, and its relation to ordinary backpropagation."""

import pytest
import torch
from support import (
    FAMILIES,
    POSITIVE,
    TASK,
    MeanPool,
    cls_attention,
    end_to_end_gradient,
    get_gradient,
    random_tiles,
    relative_difference,
    small_encoder,
    step_gradient,
    take_step,
)

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.adaptation.two_graph import _cosine_loss as cosine_loss
from tapfm.errors import SettingError
from tapfm.tasks.cross_entropy import encode_labels
from tapfm.tasks.multilabel import MultiLabelTask

EXACT = 1e-9  # relative difference of norms in float64


@pytest.mark.parametrize("family", FAMILIES)
def test_lambda_1_equals_end_to_end(family):
    encoder = small_encoder(family)
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    expected = end_to_end_gradient(encoder, aggregator, tiles)
    assert relative_difference(step_gradient(encoder, aggregator, tiles), expected) < EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_lambda_0_equals_end_to_end_with_constant_attention(family):
    encoder = small_encoder(family)
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    expected = end_to_end_gradient(encoder, aggregator, tiles, hold_attention=True)
    assert relative_difference(step_gradient(encoder, aggregator, tiles, lambda_=0.0), expected) < EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_loss_gives_the_right_part_of_the_gradient(family):
    """Tested separately, because it is a small part of the whole gradient."""
    encoder = small_encoder(family)
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    ours = step_gradient(encoder, aggregator, tiles) - step_gradient(encoder, aggregator, tiles, lambda_=0.0)
    whole = end_to_end_gradient(encoder, aggregator, tiles)
    expected = whole - end_to_end_gradient(encoder, aggregator, tiles, hold_attention=True)
    assert expected.norm() > 1e-6 * whole.norm()
    assert relative_difference(ours, expected) < 1e-7
    half = step_gradient(encoder, aggregator, tiles, lambda_=0.5) - step_gradient(
        encoder, aggregator, tiles, lambda_=0.0
    )
    assert relative_difference(2 * half, expected) < 1e-7


def test_lambda_1_equals_end_to_end_with_several_targets_and_missing_labels():
    encoder = small_encoder()
    aggregator, tiles = cls_attention(encoder, targets=3, tau=0.3, layer_norm=True), random_tiles(encoder)
    task = MultiLabelTask.from_training_labels({"EGFR": [1, 0, 0], "KRAS": [1, 1, 0], "MET": [1, 0, 0]})
    case = {"task": task, "targets": encode_labels([1, None, 0])}
    expected = end_to_end_gradient(encoder, aggregator, tiles, **case)
    assert relative_difference(step_gradient(encoder, aggregator, tiles, **case), expected) < EXACT


def test_aggregator_without_attention_gives_end_to_end_fine_tuning():
    encoder = small_encoder()
    torch.manual_seed(0)
    aggregator, tiles = MeanPool(encoder.feature_size).double(), random_tiles(encoder)
    expected = end_to_end_gradient(encoder, aggregator, tiles)
    for lambda_ in (0.0, 1.0):
        assert relative_difference(step_gradient(encoder, aggregator, tiles, lambda_=lambda_), expected) < EXACT


def test_aggregator_gets_the_end_to_end_gradient():
    encoder = small_encoder()
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    step_gradient(encoder, aggregator, tiles)
    ours = get_gradient(aggregator).clone()
    aggregator.zero_grad()
    end_to_end_gradient(encoder, aggregator, tiles)
    assert relative_difference(ours, get_gradient(aggregator)) < EXACT


def test_eq5_with_a_plus_sign_lowers_the_loss():
    """The first equality in the paper has a minus sign, which would increase the aggregator's loss."""
    encoder = small_encoder()
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)

    def loss_after(sign):
        moved = small_encoder()
        gradient = step_gradient(moved, aggregator, tiles, lambda_=0.0)
        offset, rate = 0, 1e-3 / float(gradient.norm())
        with torch.no_grad():
            for parameter in moved.parameters():
                piece = gradient[offset : offset + parameter.numel()].view_as(parameter)
                parameter -= sign * rate * piece
                offset += parameter.numel()
            z_KD, _ = moved(tiles)
            _, r_K = encoder(tiles)  # lambda = 0: the attention is constant
            return TASK.loss(aggregator(z_KD, r_K).logits_C, POSITIVE).item()

    before = TASK.loss(aggregator(*encoder(tiles)).logits_C, POSITIVE).item()
    assert loss_after(+1) < before < loss_after(-1)


def test_reported_losses_equal_the_equations():
    encoder = small_encoder()
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    adaptation = AdaptationSettings(lambda_=0.5, beta=0.1)
    report = take_step(encoder, aggregator, tiles, adaptation=adaptation)

    z_KD, r_K = (x.detach().requires_grad_() for x in encoder(tiles))
    logits_C, a_K, *_ = aggregator(z_KD, r_K)
    loss = TASK.loss(logits_C, POSITIVE)
    g_bag_D = (logits_C.sigmoid() - 1) * TASK.weights.positive * aggregator.classifier.weight[0]  # dL/dZ by hand
    loss_feature = (z_KD * (a_K[:, None] * g_bag_D)).sum()  # g_zi = a_i dL/dZ
    loss_attention = (a_K * (z_KD @ g_bag_D)).sum()  # g_ai = <z_i, dL/dZ>
    loss_cosine = sum(1 - torch.cosine_similarity(z_D, g_bag_D, dim=0) for z_D in z_KD)
    torch.testing.assert_close(report.loss_agg, loss.detach())
    torch.testing.assert_close(report.loss_feature, loss_feature.detach())
    torch.testing.assert_close(report.loss_attention, loss_attention.detach())
    torch.testing.assert_close(report.loss_cosine, loss_cosine.detach())
    total = loss_feature + 0.5 * loss_attention + 0.1 * loss_cosine
    torch.testing.assert_close(report.loss_pfm, total.detach())
    assert not any(value.requires_grad for value in report if isinstance(value, torch.Tensor))


def test_sum_of_raw_attention_times_its_gradient_is_zero():
    """sum r_i g_ri is always 0, because min-max is invariant to scale. So the reported loss is sum a_i g_ai."""
    encoder = small_encoder()
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    z_KD, r_K = (x.detach().requires_grad_() for x in encoder(tiles))
    (g_r_K,) = torch.autograd.grad(TASK.loss(aggregator(z_KD, r_K).logits_C, POSITIVE), r_K)
    assert g_r_K.norm() > 0
    assert (r_K * g_r_K).sum().abs() < 1e-12 * r_K.norm() * g_r_K.norm()


@pytest.mark.parametrize("bag_gradient", ["before", "after"])
def test_bag_gradient_is_computed_before_or_after_the_update_of_the_aggregator(bag_gradient):
    encoder = small_encoder()
    tiles = random_tiles(encoder)
    aggregator, twin = cls_attention(encoder), cls_attention(encoder)
    optimizer = torch.optim.SGD(aggregator.parameters(), lr=0.5)
    take_step(
        encoder,
        aggregator,
        tiles,
        adaptation=AdaptationSettings(bag_gradient=bag_gradient),
        update_aggregator=optimizer.step,
    )
    ours = get_gradient(encoder).clone()
    updated = end_to_end_gradient(encoder, aggregator, tiles)
    original = end_to_end_gradient(encoder, twin, tiles)
    expected, other = (original, updated) if bag_gradient == "before" else (updated, original)
    assert relative_difference(ours, expected) < EXACT
    assert relative_difference(ours, other) > 1e-3, "the two orders must give different gradients for this test"


def test_joint_updates_the_aggregator_with_a_gradient_from_the_updated_encoder():
    encoder, before = small_encoder(), small_encoder()
    tiles = random_tiles(encoder)
    aggregator, twin = cls_attention(encoder), cls_attention(encoder)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.5)
    take_step(
        encoder, aggregator, tiles, adaptation=AdaptationSettings(bag_gradient="joint"), update_encoder=optimizer.step
    )
    assert torch.equal(get_gradient(encoder), step_gradient(before, twin, tiles)), (
        "the encoder's gradient is that of Algorithm 1"
    )
    ours = get_gradient(aggregator).clone()
    gradients = []
    for each in (encoder, before):  # after and before its update
        twin.zero_grad()
        end_to_end_gradient(each, twin, tiles)
        gradients.append(get_gradient(twin).clone())
    updated, original = gradients
    assert relative_difference(ours, updated) < EXACT
    assert relative_difference(ours, original) > 1e-3, "the encoder must have changed for this test"


def test_joint_update_does_not_depend_on_chunks():
    tiles = random_tiles(small_encoder())
    gradients = []
    for chunking in (Chunking(), Chunking(2, keep_graphs=0)):
        encoder = small_encoder()
        aggregator, optimizer = cls_attention(encoder), torch.optim.SGD(encoder.parameters(), lr=0.5)
        adaptation = AdaptationSettings(bag_gradient="joint", chunking=chunking)
        take_step(encoder, aggregator, tiles, adaptation=adaptation, update_encoder=optimizer.step)
        gradients.append(get_gradient(aggregator).clone())
    assert relative_difference(*gradients) < EXACT


def test_updates_have_the_order_of_algorithm_1():
    encoder = small_encoder()
    aggregator, order = cls_attention(encoder), []

    def update_aggregator():
        order.append("aggregator")
        assert all(p.grad is None for p in encoder.parameters()), "the encoder has no gradient yet"

    take_step(
        encoder,
        aggregator,
        random_tiles(encoder),
        update_aggregator=update_aggregator,
        update_encoder=lambda: order.append("encoder"),
    )
    assert order == ["aggregator", "encoder"]


def test_beta_adds_the_gradient_of_the_cosine_loss():
    encoder = small_encoder()
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    plain = step_gradient(encoder, aggregator, tiles)
    with_term = step_gradient(encoder, aggregator, tiles, beta=0.7)
    z_KD, r_K = encoder(tiles)
    leaf = z_KD.detach().requires_grad_()
    (g_z_KD,) = torch.autograd.grad(TASK.loss(aggregator(leaf, r_K.detach()).logits_C, POSITIVE), leaf)
    encoder.zero_grad()
    torch.autograd.backward((1 - torch.cosine_similarity(z_KD, g_z_KD)).sum())
    assert relative_difference(with_term - plain, 0.7 * get_gradient(encoder)) < EXACT


def test_cosine_loss_of_the_paper_increases_the_loss_and_descending_lowers_it():
    torch.manual_seed(0)
    z_KD = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    g_z_KD = torch.randn(4, 8, dtype=torch.float64)
    for cosine, sign in (("paper", 1), ("descending", -1)):
        (gradient,) = torch.autograd.grad(cosine_loss(z_KD, g_z_KD, cosine).sum(), z_KD)
        moved = z_KD - 1e-3 * gradient
        loss_change = ((moved - z_KD) * g_z_KD).sum()
        assert loss_change * sign > 0


def test_cosine_loss_ignores_tiles_without_gradient_and_handles_tiny_gradients():
    z_KD = torch.ones(3, 4, requires_grad=True)
    g_z_KD = torch.zeros(3, 4)
    g_z_KD[0] = 1e-30
    term = cosine_loss(z_KD, g_z_KD, "paper").sum()
    (gradient,) = torch.autograd.grad(term, z_KD)
    assert term.item() == pytest.approx(0, abs=1e-6), "tile 0 is parallel to its gradient, the others have none"
    assert gradient.isfinite().all()
    assert cosine_loss(z_KD, -g_z_KD, "paper").sum().item() == pytest.approx(2)


@pytest.mark.parametrize(
    "settings",
    [
        {"lambda_": -1.0},
        {"lambda_": float("nan")},
        {"beta": -0.1},
        {"cosine_loss": "papr"},
        {"bag_gradient": "afterwards"},
        {"compute_dtype": torch.float64},
    ],
    ids=str,
)
def test_invalid_settings_are_an_error(settings):
    with pytest.raises(SettingError):
        AdaptationSettings(**settings)

"""The step on bad input, and a short run that is pinned."""

import pytest
import torch
from support import POSITIVE, TASK, cls_attention, small_encoder, some_tiles

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.two_graph import Adaptation, two_graph_step
from tapfm.contracts import BagOutput, Targets
from tapfm.errors import LabelError, NonFiniteError


def test_a_non_finite_loss_stops_before_any_update():
    encoder = small_encoder()
    aggregator = cls_attention(encoder)
    with torch.no_grad():
        aggregator.classifier.weight[0, 0] = float("inf")
    updates = []
    with pytest.raises(NonFiniteError, match=r"Slide 'case-17', step 42: the aggregator loss is not finite"):
        two_graph_step(
            encoder,
            aggregator,
            TASK,
            some_tiles(encoder),
            POSITIVE,
            update_aggregator=lambda: updates.append("aggregator"),
            update_encoder=lambda: updates.append("encoder"),
            slide="case-17",
            step=42,
        )
    assert updates == []
    assert all(p.grad is None for p in aggregator.parameters())


@pytest.mark.parametrize("chunking", [Chunking(), Chunking(2, keep=0)], ids=["one pass", "chunked"])
def test_a_non_finite_encoder_gradient_stops_before_its_update_and_is_named(chunking):
    encoder = small_encoder()
    aggregator = cls_attention(encoder)
    encoder.vit.blocks[0].mlp.fc1.weight.register_hook(lambda gradient: gradient * float("nan"))
    updates = []
    with pytest.raises(NonFiniteError, match=r"'case-17', step 3: the gradient of vit.blocks.0.mlp.fc1.weight"):
        two_graph_step(
            encoder,
            aggregator,
            TASK,
            some_tiles(encoder),
            POSITIVE,
            adaptation=Adaptation(chunking=chunking),
            update_encoder=lambda: updates.append("encoder"),
            slide="case-17",
            step=3,
        )
    assert updates == []


def test_a_non_finite_gradient_at_the_tiles_is_named():
    encoder = small_encoder()

    class Broken(torch.nn.Module):
        def forward(self, z_KD, r_K):  # finite, with an infinite slope at 0
            return BagOutput((z_KD[:, :1] - z_KD[:, :1].detach()).square().sqrt().sum(0) + 0 * r_K.sum(), None)

    with pytest.raises(NonFiniteError, match="gradient at the tile features"):
        two_graph_step(encoder, Broken(), TASK, some_tiles(encoder), POSITIVE)


def test_a_slide_without_any_label_is_refused():
    encoder = small_encoder()
    with pytest.raises(LabelError, match="'case-3' has no label"):
        two_graph_step(encoder, cls_attention(encoder), TASK, some_tiles(encoder), Targets.of([None]), slide="case-3")


def test_an_aggregator_with_another_number_of_targets_is_refused():
    encoder = small_encoder()
    with pytest.raises(LabelError, match=r"gives \(3,\) logits for \(1,\) labels"):
        two_graph_step(encoder, cls_attention(encoder, targets=3), TASK, some_tiles(encoder), POSITIVE)


def test_one_tile_is_enough():
    encoder = small_encoder()
    report = two_graph_step(encoder, cls_attention(encoder), TASK, some_tiles(encoder, 1), POSITIVE)
    assert report.norm_g_r == 0, "with one tile its weight is 1, whatever its attention"
    assert report.norm_encoder.isfinite()
    assert report.norm_encoder > 0


@pytest.mark.parametrize("chunking", [Chunking(), Chunking(3, keep=1)], ids=["one pass", "chunked"])
def test_a_short_run_learns_and_is_the_same_in_one_pass_and_in_pieces(chunking):
    """Ten steps of AdamW on two slides; the curve is pinned, so that a change of the maths shows."""
    encoder = small_encoder()
    aggregator = cls_attention(encoder)
    encoder_optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    aggregator_optimizer = torch.optim.AdamW(aggregator.parameters(), lr=1e-2)
    slides = [(some_tiles(encoder, 7, seed), Targets.of([seed % 2])) for seed in (1, 2)]
    losses = []
    for step in range(10):
        tiles, targets = slides[step % 2]
        encoder_optimizer.zero_grad()
        aggregator_optimizer.zero_grad()
        report = two_graph_step(
            encoder,
            aggregator,
            TASK,
            tiles,
            targets,
            adaptation=Adaptation(chunking=chunking),
            update_aggregator=aggregator_optimizer.step,
            update_encoder=encoder_optimizer.step,
        )
        losses.append(report.loss_agg.item())
    assert losses == pytest.approx(PINNED, rel=1e-6)
    assert sum(losses[-2:]) < 0.9 * sum(losses[:2])


PINNED = [
    0.245863238, 2.10855887, 0.137595575, 1.73946898, 0.245037148,
    1.34888836, 0.42961315, 1.05027959, 0.637497687, 0.871826766,
]  # fmt: skip

"""The two-graph step: errors for invalid input, and the loss curve of a short run."""

import pickle

import pytest
import torch
from support import POSITIVE, TASK, cls_attention, random_tiles, small_encoder, take_step

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.contracts import BagOutput
from tapfm.errors import LabelError, NonFiniteError, SettingError, TileError, UnknownNameError
from tapfm.tasks.cross_entropy import encode_labels


def test_non_finite_loss_prevents_all_updates():
    encoder = small_encoder()
    aggregator = cls_attention(encoder)
    with torch.no_grad():
        aggregator.classifier.weight[0, 0] = float("inf")
    updates = []
    with pytest.raises(NonFiniteError, match=r"Slide 'case-17', step 42: the aggregator loss is not finite"):
        take_step(
            encoder,
            aggregator,
            random_tiles(encoder),
            update_aggregator=lambda: updates.append("aggregator"),
            update_encoder=lambda: updates.append("encoder"),
            slide="case-17",
            step=42,
        )
    assert updates == []


@pytest.mark.parametrize("chunking", [Chunking(), Chunking(2, keep_graphs=0)], ids=["one pass", "chunked"])
def test_non_finite_encoder_gradient_prevents_its_update_and_is_named(chunking):
    encoder = small_encoder()
    aggregator = cls_attention(encoder)
    encoder.vit.blocks[0].mlp.fc1.weight.register_hook(lambda gradient: gradient * float("nan"))
    updates = []
    with pytest.raises(NonFiniteError, match=r"'case-17', step 3: the gradient of vit.blocks.0.mlp.fc1.weight"):
        take_step(
            encoder,
            aggregator,
            random_tiles(encoder),
            adaptation=AdaptationSettings(chunking=chunking),
            update_encoder=lambda: updates.append("encoder"),
            slide="case-17",
            step=3,
        )
    assert updates == []


def test_error_names_a_non_finite_gradient_at_the_tiles():
    encoder = small_encoder()

    class Broken(torch.nn.Module):
        def forward(self, z_KD, r_K):  # finite values with an infinite gradient at 0
            return BagOutput((z_KD[:, :1] - z_KD[:, :1].detach()).square().sqrt().sum(0) + 0 * r_K.sum(), None)

    with pytest.raises(NonFiniteError, match="gradient at the tile features"):
        take_step(encoder, Broken(), random_tiles(encoder))


def test_float16_without_a_loss_scale_is_an_error():
    encoder = small_encoder(dtype=torch.float32)
    with pytest.raises(SettingError, match="loss_scale"):
        take_step(
            encoder,
            cls_attention(encoder),
            random_tiles(encoder),
            adaptation=AdaptationSettings(compute_dtype=torch.float16),
        )


def test_slide_without_labels_is_an_error():
    encoder = small_encoder()
    with pytest.raises(LabelError, match="'case-3' has no label"):
        take_step(encoder, cls_attention(encoder), random_tiles(encoder), targets=encode_labels([None]), slide="case-3")


def test_aggregator_with_another_number_of_targets_is_an_error():
    encoder = small_encoder()
    message = r"1 targets \(FGFR3\), but .* logits have shape \(3,\) and the slide's labels have shape \({},\)"
    for targets in (POSITIVE, encode_labels([1, 0, 1])):
        with pytest.raises(LabelError, match=message.format(len(targets.labels_C))):
            take_step(encoder, cls_attention(encoder, targets=3), random_tiles(encoder), targets=targets)


@pytest.mark.parametrize("chunking", [Chunking(), Chunking(2)], ids=["one pass", "chunked"])
def test_slide_without_tiles_is_an_error(chunking):
    encoder = small_encoder()
    no_tiles = random_tiles(encoder)[:0]
    with pytest.raises(TileError, match="no tiles"):
        take_step(encoder, cls_attention(encoder), no_tiles, adaptation=AdaptationSettings(chunking=chunking))


class Additive(torch.nn.Module):
    """Aggregator with parameters for whose gradients autograd returns the same or an expanded tensor."""

    def __init__(self, feature_size, slope=1.0):
        super().__init__()
        self.classifier = torch.nn.Linear(feature_size, 1).double()
        self.one = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.two = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.many = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.slope = slope

    def forward(self, z_KD, r_K):  # noqa: ARG002
        steep = (self.one - self.one.detach()).square().sqrt() if self.slope == "infinite" else self.one
        return BagOutput(self.classifier(z_KD.mean(0)) + steep + self.two + self.many.sum(), None)


def test_aggregator_gradients_are_separate_tensors_and_accumulate():
    encoder = small_encoder()
    aggregator = Additive(encoder.feature_size)
    take_step(encoder, aggregator, random_tiles(encoder))
    once = [p.grad.clone() for p in aggregator.parameters()]
    assert len({p.grad.data_ptr() for p in aggregator.parameters()}) == len(once)
    torch.nn.utils.clip_grad_norm_(aggregator.parameters(), 1e9)  # raises an error for an expanded tensor
    take_step(encoder, aggregator, random_tiles(encoder))
    for parameter, gradient in zip(aggregator.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_non_finite_aggregator_gradient_is_named_and_prevents_its_update():
    encoder, updates = small_encoder(), []
    aggregator = Additive(encoder.feature_size, slope="infinite")
    with pytest.raises(NonFiniteError, match=r"gradient of the aggregator's one is not finite"):
        take_step(encoder, aggregator, random_tiles(encoder), update_aggregator=lambda: updates.append(1))
    assert updates == []


def test_non_finite_aggregator_after_the_update_is_an_error():
    encoder = small_encoder()
    aggregator = cls_attention(encoder)

    def break_weights():
        with torch.no_grad():
            aggregator.classifier.weight.fill_(float("nan"))

    with pytest.raises(NonFiniteError, match="aggregator loss"):
        take_step(
            encoder,
            aggregator,
            random_tiles(encoder),
            adaptation=AdaptationSettings(bag_gradient="after"),
            update_aggregator=break_weights,
        )


@pytest.mark.parametrize("bag_gradient", ["before", "after"])
def test_reported_loss_is_from_before_the_update(bag_gradient):
    encoder = small_encoder()
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    with torch.no_grad():
        expected = TASK.loss(aggregator(*encoder(tiles)).logits_C, POSITIVE)
    optimizer = torch.optim.SGD(aggregator.parameters(), lr=0.5)
    report = take_step(
        encoder,
        aggregator,
        tiles,
        adaptation=AdaptationSettings(bag_gradient=bag_gradient),
        update_aggregator=optimizer.step,
    )
    torch.testing.assert_close(report.loss_agg, expected)


def test_errors_can_be_pickled():
    for error in (
        NonFiniteError("what", hint="do"),
        UnknownNameError.with_suggestions("encoder", "un1", ["uni"], see="tapfm encoders"),
    ):
        restored = pickle.loads(pickle.dumps(error))
        assert (type(restored), str(restored)) == (type(error), str(error))


def test_step_with_one_tile():
    encoder = small_encoder()
    report = take_step(encoder, cls_attention(encoder), random_tiles(encoder, 1))
    assert report.norm_g_r == 0, "the weight of a single tile is always 1"
    assert report.norm_encoder.isfinite()
    assert report.norm_encoder > 0


@pytest.mark.parametrize("chunking", [Chunking(), Chunking(3, keep_graphs=1)], ids=["one pass", "chunked"])
def test_short_run_has_the_expected_losses(chunking):
    """Compare ten steps of AdamW on two slides with stored losses, to detect changes of the computation."""
    encoder = small_encoder()
    aggregator = cls_attention(encoder)
    encoder_optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    aggregator_optimizer = torch.optim.AdamW(aggregator.parameters(), lr=1e-2)
    slides = [(random_tiles(encoder, 7, seed), encode_labels([seed % 2])) for seed in (1, 2)]
    losses = []
    for step in range(10):
        tiles, targets = slides[step % 2]
        encoder_optimizer.zero_grad()
        aggregator_optimizer.zero_grad()
        report = take_step(
            encoder,
            aggregator,
            tiles,
            targets=targets,
            adaptation=AdaptationSettings(chunking=chunking),
            update_aggregator=aggregator_optimizer.step,
            update_encoder=encoder_optimizer.step,
        )
        losses.append(report.loss_agg.item())
    assert losses == pytest.approx(EXPECTED_LOSSES, rel=1e-6)
    assert sum(losses[-2:]) < 0.9 * sum(losses[:2])


EXPECTED_LOSSES = [
    0.245863238, 2.10855887, 0.137595575, 1.73946898, 0.245037148,
    1.34888836, 0.42961315, 1.05027959, 0.637497687, 0.871826766,
]  # fmt: skip

"""Retries after out of memory, training in low precision, and the loss scale of float16."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import random_tiles, relative_difference
from training_slides import make_learner

from tapfm.adaptation import loss_scale
from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.learner import Learner, OptimiserSettings
from tapfm.adaptation.loss_scale import LossScale
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.errors import TapfmError
from tapfm.inference.bags import Bag
from tapfm.tasks.cross_entropy import encode_labels


def make_bag(learner, seed, tiles=9):
    return Bag(random_tiles(learner.model.encoder, tiles, seed), np.arange(tiles))


def train(learner, *seeds, slides_per_step=1):
    reports = []
    for number, seed in enumerate(seeds):
        update = (number + 1) % slides_per_step == 0
        reports.append(
            learner.train_step(make_bag(learner, seed), encode_labels([seed % 2]), update=update, slide_id=f"s{seed}")
        )
    return reports


def assert_same_update(ours, expected, initial):
    """Compare the changes of all weights. Adam's first steps are signs, so single weights may differ by rounding."""
    for owner in ("encoder/", "aggregator/"):
        moves = [
            torch.cat([(each.weights()[name] - w).flatten() for name, w in initial.weights().items() if owner in name])
            for each in (ours, expected)
        ]
        assert moves[1].norm() > 0
        assert relative_difference(*moves) < 0.05


class LimitedMemory:
    """Encoder forward that is out of memory for more than `max_tiles` tiles with a graph, after `first_call` calls."""

    def __init__(self, learner, monkeypatch, *, max_tiles, first_call=0, error=None):
        self.calls, self.max_tiles, self.first_call = [], max_tiles, first_call
        self.error = error or torch.OutOfMemoryError("CUDA out of memory")
        self.forward = learner.model.encoder.forward
        monkeypatch.setattr(learner.model.encoder, "forward", self)

    def __call__(self, tiles):
        self.calls.append(len(tiles))
        if torch.is_grad_enabled() and len(tiles) > self.max_tiles and len(self.calls) > self.first_call:
            raise self.error
        return self.forward(tiles)


@pytest.mark.parametrize("bag_gradient", ["before", "after", "joint"])
def test_out_of_memory_is_retried_with_smaller_chunks(monkeypatch, bag_gradient):
    def make():
        learner = make_learner()
        learner.adaptation = replace(learner.adaptation, chunking=Chunking(), bag_gradient=bag_gradient)
        learner.start_epoch(0)
        return learner

    expected, ours, reported = make(), make(), []
    plain = train(expected, 1, 2)
    ours.on_smaller_chunks = reported.append
    LimitedMemory(ours, monkeypatch, max_tiles=3)
    retried = train(ours, 1, 2)
    assert reported == [5, 3], "9 tiles, then at most 5, then at most 3"
    for one, other in zip(plain, retried, strict=True):
        torch.testing.assert_close(one.loss_agg, other.loss_agg, rtol=1e-5, atol=1e-6)
    assert_same_update(ours, expected, make())
    assert ours.adaptation.chunking == Chunking(3)


LIBRARY_ERRORS = [  # out of memory in libraries
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "Triton Error [CUDA]: out of memory",
    "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate 88.00 MiB.",
]


@pytest.mark.parametrize("message", LIBRARY_ERRORS)
def test_out_of_memory_in_a_library_is_retried(monkeypatch, message):
    ours, reported = make_learner(), []
    ours.adaptation = replace(ours.adaptation, chunking=Chunking())
    ours.start_epoch(0)
    ours.on_smaller_chunks = reported.append
    LimitedMemory(ours, monkeypatch, max_tiles=5, error=RuntimeError(message))
    train(ours, 1)
    assert reported == [5]
    LimitedMemory(
        ours, monkeypatch, max_tiles=0, error=RuntimeError("CUDA error: an illegal memory access was encountered")
    )
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train(ours, 2)
    assert reported == [5]


def test_pending_slides_are_repeated_after_out_of_memory(monkeypatch):
    expected, ours = make_learner(slides_per_step=3), make_learner(slides_per_step=3)
    for learner in (expected, ours):
        learner.adaptation = replace(learner.adaptation, chunking=Chunking(4))
        learner.start_epoch(0)
    train(expected, 1, 2, 3, slides_per_step=3)
    small = LimitedMemory(ours, monkeypatch, max_tiles=2, first_call=9)  # in the middle of the third slide
    train(ours, 1, 2, 3, slides_per_step=3)
    assert small.calls.count(3) > 0, "chunks of 9 tiles, at most 4"
    assert max(small.calls[-5:]) == 2
    assert_same_update(ours, expected, make_learner())


def test_retry_uses_the_random_state_of_the_start_of_the_step(monkeypatch):
    def make():
        learner = make_learner()
        for module in learner.model.encoder.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
        learner.adaptation = replace(learner.adaptation, chunking=Chunking(2, keep_graphs=0))
        learner.start_epoch(0)
        torch.manual_seed(5)
        return learner

    expected = make()
    train(expected, 1)
    after = torch.rand(3)
    ours = make()
    ours.adaptation = replace(ours.adaptation, chunking=Chunking(3, keep_graphs=0))
    LimitedMemory(ours, monkeypatch, max_tiles=2)
    train(ours, 1)
    torch.testing.assert_close(torch.rand(3), after)


def test_error_if_one_tile_does_not_fit(monkeypatch):
    learner = make_learner()
    learner.start_epoch(0)
    LimitedMemory(learner, monkeypatch, max_tiles=0)
    with pytest.raises(TapfmError, match="'s1': cpu does not have enough memory for one step") as caught:
        train(learner, 1)
    assert "tapfm plan" in caught.value.hint


def test_out_of_memory_during_a_retry_is_retried_again(monkeypatch):
    expected, ours, reported = make_learner(slides_per_step=2), make_learner(slides_per_step=2), []
    for learner in (expected, ours):
        learner.adaptation = replace(learner.adaptation, chunking=Chunking(9))
        learner.start_epoch(0)
    train(expected, 1, 2, slides_per_step=2)
    ours.on_smaller_chunks = reported.append
    LimitedMemory(ours, monkeypatch, max_tiles=3, first_call=1)  # the first slide fits only once
    train(ours, 1, 2, slides_per_step=2)
    assert reported == [5, 3]
    assert_same_update(ours, expected, make_learner())


@pytest.mark.parametrize("bag_gradient", ["before", "joint"])
def test_update_of_the_encoder_is_never_repeated(monkeypatch, bag_gradient):
    """Out of memory in the optimiser's step or, with "joint", in the forward pass after it."""
    learner = make_learner()
    learner.adaptation = replace(learner.adaptation, bag_gradient=bag_gradient)
    learner.start_epoch(0)
    steps, step = [], learner._encoder_optimiser.step

    def run_out_of_memory(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def update(**settings):
        steps.append(step(**settings))
        if bag_gradient == "before":
            run_out_of_memory()
        monkeypatch.setattr(learner.model.encoder, "forward", run_out_of_memory)

    monkeypatch.setattr(learner._encoder_optimiser, "step", update)
    with pytest.raises(TapfmError, match=r"'s1': cpu ran out of memory .* update of the encoder") as caught:
        train(learner, 1)
    assert len(steps) == 1
    assert "machine.offload_optimiser=true" in caught.value.hint


@pytest.mark.parametrize("settings", [{}, {"moments": "int8"}, {"offload": True}], ids=str)
def test_training_with_bfloat16_weights_follows_float32(settings):
    plain, low = make_learner(rate=1e-4), make_learner(rate=1e-4, weights_dtype=torch.bfloat16, **settings)
    before = {name: weight.clone() for name, weight in plain.weights().items()}
    for learner in (plain, low):
        learner.start_epoch(0)
    losses = [torch.stack([report.loss_agg for report in train(each, *range(12))]) for each in (plain, low)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0.03, atol=0.01)
    assert {weight.dtype for weight in low.weights().values()} == {torch.float32}
    moved, ours = (
        torch.cat([(each.weights()[name] - before[name]).flatten() for name in before if "encoder" in name])
        for each in (plain, low)
    )
    assert moved.norm() > 0
    assert torch.cosine_similarity(moved, ours, dim=0) > 0.8, "Adam's first steps are signs: small ones may flip"
    assert all(p.dtype == torch.bfloat16 for p in low.model.encoder.vit.parameters())


def test_gradients_of_chunks_are_accumulated_in_float32():
    wide = make_learner(weights_dtype=torch.bfloat16)
    narrow = make_learner(weights_dtype=torch.bfloat16, float32_gradients=False)
    for learner in (wide, narrow):
        learner.start_epoch(0)
        learner.adaptation = replace(learner.adaptation, chunking=Chunking(1, keep_graphs=0))
        learner.train_step(make_bag(learner, 1), encode_labels([1]), update=False, slide_id="s")
    types = [{p.grad.dtype for p in each.model.encoder.parameters() if p.grad is not None} for each in (wide, narrow)]
    assert types == [{torch.float32}, {torch.bfloat16}]


def test_resume_in_low_precision_is_bit_exact():
    def make():
        learner = make_learner(weights_dtype=torch.bfloat16, moments="bfloat16")
        learner.start_epoch(0)
        return learner

    whole, first, second = make(), make(), make()
    train(whole, 1, 2, 3, 4)
    train(first, 1, 2)
    state = {name: value.clone() for name, value in first.state().items()}
    second.restore(state)
    train(second, 3, 4)
    for name, weight in whole.weights().items():
        assert torch.equal(weight, second.weights()[name]), name


def test_group_with_a_non_finite_gradient_changes_no_encoder_weight():
    learner = make_learner(slides_per_step=2)
    learner.start_epoch(0)
    broken = learner.model.encoder.vit.blocks[0].mlp.fc1.weight.register_hook(lambda grad: grad * float("nan"))
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    bad = learner.train_step(make_bag(learner, 1), encode_labels([1]), update=False, slide_id="s")
    broken.remove()
    learner.train_step(make_bag(learner, 2), encode_labels([0]), update=True, slide_id="t")
    assert not bool(bad.checks.all())
    encoder = {name for name in before if name.startswith("encoder/")}
    assert all(torch.equal(learner.weights()[name], before[name]) for name in encoder)


def test_loss_scale_halves_after_overflow_and_doubles_after_finite_steps(monkeypatch):
    monkeypatch.setattr(loss_scale, "_GROWTH_INTERVAL", 3)
    scale, yes, no = LossScale(torch.device("cpu")), torch.tensor(True), torch.tensor(False)
    values = []
    for finite in (no, yes, yes, yes, yes, no, yes, yes, yes):
        scale.advance(finite)
        values.append(float(scale.value) / loss_scale._INITIAL_SCALE)
    assert values == [0.5, 0.5, 0.5, 1, 1, 0.5, 0.5, 0.5, 1]
    other = LossScale(torch.device("cpu"))
    other.restore(scale.state())
    assert other.state() == scale.state()


def test_loss_scale_is_not_usable_below_its_minimum():
    scale = LossScale(torch.device("cpu"))
    for _ in range(24):
        assert bool(scale.can_decrease())
        scale.advance(torch.tensor(False))
    scale.advance(torch.tensor(False))
    assert not bool(scale.can_decrease())


def test_float16_skips_a_step_with_overflow_and_lowers_the_scale():
    learner = make_learner(compute_dtype=torch.float16)
    learner.start_epoch(0)
    learner._loss_scale.value.fill_(2.0**126)
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    first = train(learner, 1)[0]
    encoder = {name for name in before if name.startswith("encoder/")}
    assert all(torch.equal(learner.weights()[name], before[name]) for name in encoder), "skipped"
    assert bool(first.checks.all()), "overflow is not an error"
    assert first.norm_encoder == 0
    assert learner.state()["moments/loss_scale/value"] == 2.0**125
    for _ in range(140):
        if train(learner, 1)[0].norm_encoder > 0:
            break
    assert any(not torch.equal(learner.weights()[name], before[name]) for name in encoder)


def test_float16_overflow_is_not_applied_if_the_last_slide_of_a_group_fails():
    learner = make_learner(compute_dtype=torch.float16, slides_per_step=2)
    learner.start_epoch(0)
    learner._loss_scale.value.fill_(2.0**126)
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    learner.train_step(make_bag(learner, 1), encode_labels([1]), update=False, slide_id="s")
    learner.apply_pending()
    for name, weight in learner.weights().items():
        assert torch.equal(weight, before[name]) == name.startswith("encoder/"), name
    assert learner._loss_scale.value == 2.0**125


def test_loss_scale_does_not_become_infinite(monkeypatch):
    monkeypatch.setattr(loss_scale, "_GROWTH_INTERVAL", 1)
    scale = LossScale(torch.device("cpu"))
    for _ in range(130):
        scale.advance(torch.tensor(True))
    assert scale.value == 2.0**127
    scale.advance(torch.tensor(False))
    assert scale.value == 2.0**126


def test_stored_features_need_no_loss_scale():
    model = make_learner().model
    model.encoder = None
    learner = Learner(model, AdaptationSettings(compute_dtype=torch.float16), OptimiserSettings())
    assert not any("loss_scale" in name for name in learner.state())


def test_loss_scale_does_not_change_the_update():
    scaled, plain = make_learner(compute_dtype=torch.float16, clip_norm=0.5), make_learner(clip_norm=0.5)
    for learner in (scaled, plain):
        learner.start_epoch(0)
    reports = [train(learner, 1)[0] for learner in (scaled, plain)]
    torch.testing.assert_close(reports[0].norm_encoder, reports[1].norm_encoder, rtol=0.02, atol=0)
    moved = [
        torch.cat([weight.flatten() for name, weight in each.weights().items() if "encoder" in name])
        for each in (scaled, plain)
    ]
    torch.testing.assert_close(moved[0], moved[1], rtol=0, atol=2e-3)

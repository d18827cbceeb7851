"""A step that did not fit starts over; low precision learns beside full precision; scales of float16."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import relative_difference, some_tiles
from training_slides import make_learner

from tapfm.adaptation import loss_scale
from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.learner import Learner, OptimiserSettings
from tapfm.adaptation.loss_scale import LossScale
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.errors import TapfmError
from tapfm.inference.bags import Bag
from tapfm.tasks.cross_entropy import encode_labels


def bag_of(learner, seed, tiles=9):
    return Bag(some_tiles(learner.model.encoder, tiles, seed), np.arange(tiles))


def learn(learner, *seeds, together=1):
    reports = []
    for number, seed in enumerate(seeds):
        now = (number + 1) % together == 0
        reports.append(
            learner.train_step(bag_of(learner, seed), encode_labels([seed % 2]), update=now, slide_id=f"s{seed}")
        )
    return reports


def assert_moved_alike(ours, expected, begun):
    """Adam's first steps are signs: where a gradient is 0 but for rounding, any step is right."""
    for owner in ("encoder/", "aggregator/"):
        moves = [
            torch.cat([(each.weights()[name] - w).flatten() for name, w in begun.weights().items() if owner in name])
            for each in (ours, expected)
        ]
        assert moves[1].norm() > 0
        assert relative_difference(*moves) < 0.05


class TooSmall:
    """Stands for a card that holds no more than so many tiles with a graph."""

    def __init__(self, learner, monkeypatch, *, most, after=0, error=None):
        self.calls, self.most, self.after = [], most, after
        self.error = error or torch.OutOfMemoryError("as a GPU says it")
        self.forward = learner.model.encoder.forward
        monkeypatch.setattr(learner.model.encoder, "forward", self)

    def __call__(self, tiles):
        self.calls.append(len(tiles))
        if torch.is_grad_enabled() and len(tiles) > self.most and len(self.calls) > self.after:
            raise self.error
        return self.forward(tiles)


@pytest.mark.parametrize("bag_gradient", ["before", "after", "joint"])
def test_a_step_that_does_not_fit_starts_over_in_smaller_chunks(monkeypatch, bag_gradient):
    def make():
        learner = make_learner()
        learner.adaptation = replace(learner.adaptation, chunking=Chunking(), bag_gradient=bag_gradient)
        learner.start_epoch(0)
        return learner

    expected, ours, told = make(), make(), []
    plain = learn(expected, 1, 2)
    ours.on_smaller_chunks = told.append
    TooSmall(ours, monkeypatch, most=3)
    starting_over = learn(ours, 1, 2)
    assert told == [5, 3], "9 tiles; at most 5; at most 3"
    for one, other in zip(plain, starting_over, strict=True):
        torch.testing.assert_close(one.loss_agg, other.loss_agg, rtol=1e-5, atol=1e-6)
    assert_moved_alike(ours, expected, make())
    assert ours.adaptation.chunking == Chunking(3)


ELSEWHERE = [  # as libraries say that there is no memory
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "Triton Error [CUDA]: out of memory",
]


@pytest.mark.parametrize("said", ELSEWHERE)
def test_memory_that_ends_in_a_library_is_no_other_error(monkeypatch, said):
    ours, told = make_learner(), []
    ours.adaptation = replace(ours.adaptation, chunking=Chunking())
    ours.start_epoch(0)
    ours.on_smaller_chunks = told.append
    TooSmall(ours, monkeypatch, most=5, error=RuntimeError(said))
    learn(ours, 1)
    assert told == [5]
    TooSmall(ours, monkeypatch, most=0, error=RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        learn(ours, 2)
    assert told == [5]


def test_slides_whose_gradients_wait_are_gone_through_again(monkeypatch):
    expected, ours = make_learner(slides_per_step=3), make_learner(slides_per_step=3)
    for learner in (expected, ours):
        learner.adaptation = replace(learner.adaptation, chunking=Chunking(4))
        learner.start_epoch(0)
    learn(expected, 1, 2, 3, together=3)
    small = TooSmall(ours, monkeypatch, most=2, after=9)  # in the middle of the third slide
    learn(ours, 1, 2, 3, together=3)
    assert small.calls.count(3) > 0, "chunks of 9 tiles, at most 4"
    assert max(small.calls[-5:]) == 2
    assert_moved_alike(ours, expected, make_learner())


def test_random_masks_are_drawn_anew_from_where_the_step_began(monkeypatch):
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
    learn(expected, 1)
    after = torch.rand(3)
    ours = make()
    ours.adaptation = replace(ours.adaptation, chunking=Chunking(3, keep_graphs=0))
    TooSmall(ours, monkeypatch, most=2)
    learn(ours, 1)
    torch.testing.assert_close(torch.rand(3), after)


def test_where_one_tile_is_too_much_it_says_what_to_type(monkeypatch):
    learner = make_learner()
    learner.start_epoch(0)
    TooSmall(learner, monkeypatch, most=0)
    with pytest.raises(TapfmError, match="'s1': the memory of cpu does not hold one step") as caught:
        learn(learner, 1)
    assert "tapfm plan" in caught.value.hint


def test_where_memory_ends_again_while_waiting_slides_are_gone_through_they_start_over_too(monkeypatch):
    expected, ours, told = make_learner(slides_per_step=2), make_learner(slides_per_step=2), []
    for learner in (expected, ours):
        learner.adaptation = replace(learner.adaptation, chunking=Chunking(9))
        learner.start_epoch(0)
    learn(expected, 1, 2, together=2)
    ours.on_smaller_chunks = told.append
    TooSmall(ours, monkeypatch, most=3, after=1)  # the first slide fits once, and then no more
    learn(ours, 1, 2, together=2)
    assert told == [5, 3]
    assert_moved_alike(ours, expected, make_learner())


@pytest.mark.parametrize("bag_gradient", ["before", "joint"])
def test_an_update_of_the_encoder_is_never_made_twice(monkeypatch, bag_gradient):
    """Memory ends within the optimiser's step, or, after it, in joint's second look."""
    learner = make_learner()
    learner.adaptation = replace(learner.adaptation, bag_gradient=bag_gradient)
    learner.start_epoch(0)
    steps, step = [], learner._encoder_optimiser.step

    def no_memory(*_args, **_kwargs):
        raise torch.OutOfMemoryError("as a GPU says it")

    def update(**settings):
        steps.append(step(**settings))
        if bag_gradient == "before":
            no_memory()
        monkeypatch.setattr(learner.model.encoder, "forward", no_memory)

    monkeypatch.setattr(learner._encoder_optimiser, "step", update)
    with pytest.raises(TapfmError, match="'s1': the memory of cpu ended in the middle of the encoder's") as caught:
        learn(learner, 1)
    assert len(steps) == 1
    assert "machine.offload_optimiser=true" in caught.value.hint


@pytest.mark.parametrize("settings", [{}, {"moments": "int8"}, {"offload": True}], ids=str)
def test_weights_in_bfloat16_learn_as_those_in_float32(settings):
    plain, low = make_learner(rate=1e-4), make_learner(rate=1e-4, weights_dtype=torch.bfloat16, **settings)
    before = {name: weight.clone() for name, weight in plain.weights().items()}
    for learner in (plain, low):
        learner.start_epoch(0)
    losses = [torch.stack([report.loss_agg for report in learn(each, *range(12))]) for each in (plain, low)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0.03, atol=0.01)
    assert {weight.dtype for weight in low.weights().values()} == {torch.float32}
    moved, ours = (
        torch.cat([(each.weights()[name] - before[name]).flatten() for name in before if "encoder" in name])
        for each in (plain, low)
    )
    assert moved.norm() > 0
    assert torch.cosine_similarity(moved, ours, dim=0) > 0.8, "Adam's first steps are signs: small ones may flip"
    assert all(p.dtype == torch.bfloat16 for p in low.model.encoder.vit.parameters())


def test_gradients_of_many_chunks_are_summed_up_in_float32():
    wide = make_learner(weights_dtype=torch.bfloat16)
    narrow = make_learner(weights_dtype=torch.bfloat16, float32_gradients=False)
    for learner in (wide, narrow):
        learner.start_epoch(0)
        learner.adaptation = replace(learner.adaptation, chunking=Chunking(1, keep_graphs=0))
        learner.train_step(bag_of(learner, 1), encode_labels([1]), update=False, slide_id="s")
    types = [{p.grad.dtype for p in each.model.encoder.parameters() if p.grad is not None} for each in (wide, narrow)]
    assert types == [{torch.float32}, {torch.bfloat16}]


def test_a_checkpoint_of_low_precision_goes_on_bit_by_bit():
    def make():
        learner = make_learner(weights_dtype=torch.bfloat16, moments="bfloat16")
        learner.start_epoch(0)
        return learner

    whole, first, second = make(), make(), make()
    learn(whole, 1, 2, 3, 4)
    learn(first, 1, 2)
    state = {name: value.clone() for name, value in first.state().items()}
    second.restore(state)
    learn(second, 3, 4)
    for name, weight in whole.weights().items():
        assert torch.equal(weight, second.weights()[name]), name


def test_a_step_that_is_not_finite_changes_nothing_even_when_its_report_is_read_late():
    learner = make_learner(slides_per_step=2)
    learner.start_epoch(0)
    broken = learner.model.encoder.vit.blocks[0].mlp.fc1.weight.register_hook(lambda grad: grad * float("nan"))
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    bad = learner.train_step(bag_of(learner, 1), encode_labels([1]), update=False, slide_id="s")
    broken.remove()
    learner.train_step(bag_of(learner, 2), encode_labels([0]), update=True, slide_id="t")
    assert not bool(bad.checks.all())
    encoder = {name for name in before if name.startswith("encoder/")}
    assert all(torch.equal(learner.weights()[name], before[name]) for name in encoder)


def test_the_scale_halves_after_infinite_gradients_and_doubles_after_enough_finite_ones(monkeypatch):
    monkeypatch.setattr(loss_scale, "_GROWTH_INTERVAL", 3)
    scale, yes, no = LossScale(torch.device("cpu")), torch.tensor(True), torch.tensor(False)
    seen = []
    for finite in (no, yes, yes, yes, yes, no, yes, yes, yes):
        scale.advance(finite)
        seen.append(float(scale.value) / loss_scale._INITIAL)
    assert seen == [0.5, 0.5, 0.5, 1, 1, 0.5, 0.5, 0.5, 1]
    other = LossScale(torch.device("cpu"))
    other.restore(scale.state())
    assert other.state() == scale.state()


def test_a_scale_that_has_become_too_small_is_said():
    scale = LossScale(torch.device("cpu"))
    for _ in range(24):
        assert bool(scale.usable())
        scale.advance(torch.tensor(False))
    scale.advance(torch.tensor(False))
    assert not bool(scale.usable())


def test_float16_skips_a_step_whose_gradients_overflow_and_learns_with_a_smaller_scale():
    learner = make_learner(compute_dtype=torch.float16)
    learner.start_epoch(0)
    learner._loss_scale.value.fill_(2.0**126)
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    first = learn(learner, 1)[0]
    encoder = {name for name in before if name.startswith("encoder/")}
    assert all(torch.equal(learner.weights()[name], before[name]) for name in encoder), "skipped"
    assert bool(first.checks.all()), "and no error"
    assert first.norm_encoder == 0
    assert learner.state()["moments/loss_scale/value"] == 2.0**125
    for _ in range(140):
        if learn(learner, 1)[0].norm_encoder > 0:
            break
    assert any(not torch.equal(learner.weights()[name], before[name]) for name in encoder)


def test_float16_gradients_that_overflow_are_not_applied_when_the_last_slide_of_a_group_fails():
    learner = make_learner(compute_dtype=torch.float16, slides_per_step=2)
    learner.start_epoch(0)
    learner._loss_scale.value.fill_(2.0**126)
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    learner.train_step(bag_of(learner, 1), encode_labels([1]), update=False, slide_id="s")
    learner.apply_pending()
    for name, weight in learner.weights().items():
        assert torch.equal(weight, before[name]) == name.startswith("encoder/"), name
    assert learner._loss_scale.value == 2.0**125


def test_a_scale_that_nothing_stops_does_not_become_infinite(monkeypatch):
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


def test_the_scale_leaves_the_size_of_the_update_as_it_is():
    scaled, plain = make_learner(compute_dtype=torch.float16, clip_norm=0.5), make_learner(clip_norm=0.5)
    for learner in (scaled, plain):
        learner.start_epoch(0)
    reports = [learn(learner, 1)[0] for learner in (scaled, plain)]
    torch.testing.assert_close(reports[0].norm_encoder, reports[1].norm_encoder, rtol=0.02, atol=0)
    moved = [
        torch.cat([weight.flatten() for name, weight in each.weights().items() if "encoder" in name])
        for each in (scaled, plain)
    ]
    torch.testing.assert_close(moved[0], moved[1], rtol=0, atol=2e-3)

"""Two AdamW and their learning rates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tapfm.adaptation.optimisers import (
    Schedule,
    make_optimiser,
    optimiser_state,
    restore_optimiser,
    set_rate,
    update,
)


@given(
    first=st.integers(1, 12), factor=st.integers(1, 3), highest=st.floats(1e-7, 1e-1), lowest=st.sampled_from([0, 1e-8])
)
def test_the_schedule_is_torchs_cosine_annealing_with_warm_restarts(first, factor, highest, lowest):
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=highest)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimiser, first, factor, eta_min=lowest)
    ours = Schedule(first, factor)
    for epoch in range(40):
        assert ours.rate(epoch, highest, lowest) == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-9, abs=1e-15)
        optimiser.step()
        theirs.step()


def test_the_papers_schedule_restarts_after_10_epochs_and_then_after_20():
    rates = [Schedule(10, 2).rate(epoch, 1.0) for epoch in range(31)]
    assert [epoch for epoch, rate in enumerate(rates) if rate == 1.0] == [0, 10, 30]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def test_biases_and_norms_are_decayed_or_not():
    decayed = make_optimiser(model().named_parameters(), weight_decay=0.1, decay_all=True)
    assert [(len(g["params"]), g["weight_decay"]) for g in decayed.param_groups] == [(6, 0.1)]
    some = make_optimiser(model().named_parameters(), weight_decay=0.1, decay_all=False)
    assert [(len(g["params"]), g["weight_decay"]) for g in some.param_groups] == [(2, 0.1), (4, 0.0)]


def test_what_is_frozen_has_no_optimiser():
    frozen = model().requires_grad_(False)
    assert make_optimiser(frozen.named_parameters(), weight_decay=0.0, decay_all=True) is None
    update(None, slides=1, clip_norm=0.0)


def step(net, optimiser, seed):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    net(x).square().sum().backward()
    update(optimiser, slides=1, clip_norm=0.0)


def test_a_restored_optimiser_goes_on_as_the_saved_one():
    nets, optimisers = [model(), model()], []
    for net in nets:
        optimisers.append(make_optimiser(net.named_parameters(), weight_decay=0.1, decay_all=False))
        set_rate(optimisers[-1], 1e-2)
    for seed in range(3):
        step(nets[0], optimisers[0], seed)
    names = [{parameter: name for name, parameter in net.named_parameters()} for net in nets]
    saved = {name: value.clone() for name, value in optimiser_state(optimisers[0], names[0]).items()}
    assert "0.weight/exp_avg" in saved
    nets[1].load_state_dict(nets[0].state_dict())
    restore_optimiser(optimisers[1], names[1], saved)
    for net, optimiser in zip(nets, optimisers, strict=True):
        step(net, optimiser, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(*(net.parameters() for net in nets), strict=True))


def test_gradients_are_averaged_clipped_and_forgotten():
    parameter = nn.Parameter(torch.zeros(2, 1))
    optimiser = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.tensor([[6.0], [8.0]])
    update(optimiser, slides=2, clip_norm=0.0)
    assert torch.equal(parameter.detach(), torch.tensor([[-3.0], [-4.0]]))
    assert parameter.grad is None
    parameter.grad = torch.tensor([[6.0], [8.0]])
    update(optimiser, slides=2, clip_norm=1.0)
    torch.testing.assert_close(parameter.detach(), torch.tensor([[-3.6], [-4.8]]))

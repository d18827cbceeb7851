"""AdamW in all its forms, against torch's, and its learning rates."""

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tapfm.adaptation import optimisers, shards
from tapfm.adaptation.optimisers import (
    AdamW,
    LearningRateSchedule,
    bytes_per_parameter,
    make_optimiser,
    set_learning_rate,
    step_optimiser,
)
from tapfm.adaptation.optimisers import (
    _update_shard as update_shard,
)
from tapfm.adaptation.shards import take_flat_gradient
from tapfm.errors import CheckpointError
from tapfm.runs.checkpoint import load_checkpoint, save_checkpoint

CPU = torch.device("cpu")
YES = torch.tensor(True)
FORMS = ("float32", "bfloat16", "int8")
ALL_FORMS = tuple(itertools.product(FORMS, (None, torch.bfloat16), (False, True)))


@given(
    first=st.integers(1, 12), factor=st.integers(1, 3), highest=st.floats(1e-7, 1e-1), lowest=st.sampled_from([0, 1e-8])
)
def test_the_schedule_is_torchs_cosine_annealing_with_warm_restarts(first, factor, highest, lowest):
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=highest)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimiser, first, factor, eta_min=lowest)
    ours = LearningRateSchedule(first, factor)
    for epoch in range(40):
        assert ours.rate(epoch, highest, lowest) == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-9, abs=1e-15)
        optimiser.step()
        theirs.step()


def test_the_papers_schedule_restarts_after_10_epochs_and_then_after_20():
    rates = [LearningRateSchedule(10, 2).rate(epoch, 1.0) for epoch in range(31)]
    assert [epoch for epoch, rate in enumerate(rates) if rate == 1.0] == [0, 10, 30]


def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 20), nn.GELU(), nn.Linear(20, 1))


def optimise(net, *, rate=1e-2, weight_decay=0.1, decay_all=False, **form):
    optimiser = AdamW(dict(net.named_parameters()), device=CPU, weight_decay=weight_decay, decay_all=decay_all, **form)
    optimiser.set_learning_rate(rate)
    return optimiser


def add_gradients(net, seed, size=1.0):
    draw = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(net.parameters()):
        gradient = torch.randn(parameter.shape, dtype=torch.float64, generator=draw) * size * 10.0**-number
        parameter.grad = gradient.to(parameter.dtype).to(getattr(parameter, "grad_dtype", parameter.dtype))


def copied(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(params=["side by side", "large ones alone"])
def small_shards(monkeypatch, request):
    monkeypatch.setattr(shards, "SHARD_ELEMENTS", 1000)
    if request.param == "large ones alone":
        monkeypatch.setattr(shards, "_OWN_SHARD_ELEMENTS", 200)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_it_is_torchs_adamw(dtype, rtol, decay_all, offload):
    ours, theirs = small_net().to(dtype), small_net().to(dtype)
    our_optimiser = optimise(ours, decay_all=decay_all, offload=offload)
    matrices = [p for p in theirs.parameters() if p.ndim > 1 or decay_all]
    vectors = [p for p in theirs.parameters() if not (p.ndim > 1 or decay_all)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    their_optimiser = torch.optim.AdamW([group for group in groups if group["params"]])
    for seed in range(50):
        rate = LearningRateSchedule(10, 2).rate(seed, 1e-2)
        our_optimiser.set_learning_rate(rate)
        for group in their_optimiser.param_groups:
            group["lr"] = rate
        for net in (ours, theirs):
            add_gradients(net, seed, size=1 + seed)
        our_optimiser.step()
        their_optimiser.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=rtol)


def test_parameters_keep_identity_and_values_and_become_views_of_few_tensors():
    net = small_net()
    before, values = list(net.parameters()), copied(net.state_dict())
    optimiser = optimise(net, decay_all=True)
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    assert same(net.state_dict(), values)
    assert len({parameter.untyped_storage().data_ptr() for parameter in net.parameters()}) == 1
    assert len(optimiser.shards) == 1
    # a step of a shard is a step of the parameter, without any copy
    add_gradients(net, 0)
    optimiser.step()
    assert not same(net.state_dict(), values)


def test_parameters_start_at_whole_blocks_in_shards_of_a_limited_size(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_ELEMENTS", 1024)
    sizes = {"a": 3, "b": 700, "c": 300, "large": 5000, "d": 1024, "e": 1}
    optimiser = AdamW(
        {name: nn.Parameter(torch.full((size,), float(size))) for name, size in sizes.items()},
        device=CPU,
        weight_decay=0.0,
        decay_all=True,
    )
    names = [[place.name for place in shard.slices] for shard in optimiser.shards]
    assert names == [["a", "b"], ["c"], ["large"], ["d"], ["e"]]
    assert all(place.start % 256 == 0 for shard in optimiser.shards for place in shard.slices)
    assert all((values == sizes[name]).all() for name, values in optimiser.master_weights().items())


def test_a_large_parameter_has_a_shard_alone_and_its_gradient_is_taken_as_it_lies(monkeypatch):
    monkeypatch.setattr(shards, "_OWN_SHARD_ELEMENTS", 512)
    parameters = {
        "a": nn.Parameter(torch.zeros(3)),
        "b": nn.Parameter(torch.zeros(2, 256)),
        "c": nn.Parameter(torch.zeros(2)),
    }
    optimiser = AdamW(parameters, device=CPU, weight_decay=0.0, decay_all=True)
    assert [[place.name for place in shard.slices] for shard in optimiser.shards] == [["b"], ["a", "c"]]
    alone, together = optimiser.shards
    values = torch.arange(512.0).view(2, 256)
    parameters["b"].grad = gradient = values.clone()
    assert take_flat_gradient(alone).data_ptr() == gradient.data_ptr()
    assert parameters["b"].grad is None
    parameters["b"].grad = values.t().contiguous().t()  # lies otherwise than the parameter
    assert torch.equal(take_flat_gradient(alone), values)
    assert torch.equal(take_flat_gradient(alone), torch.zeros(2, 256))  # there is none
    parameters["c"].grad = torch.ones(2)
    assert take_flat_gradient(together).view(-1)[[0, 255, 256, 257, 258]].tolist() == [0, 0, 1, 1, 0]


def test_biases_and_norms_are_decayed_or_not():
    for decay_all in (True, False):
        net = small_net()
        before = copied(net.state_dict())
        optimiser = optimise(net, rate=0.5, decay_all=decay_all)
        optimiser.step()  # without gradients, which are 0 then: what moves is decayed
        for name, value in net.state_dict().items():
            factor = 1 - 0.5 * 0.1 if value.ndim > 1 or decay_all else 1.0
            torch.testing.assert_close(value, before[name] * factor)


def test_what_is_frozen_has_no_optimiser_and_what_is_half_frozen_has_one_of_the_other_half():
    net = small_net().requires_grad_(False)
    settings = {"weight_decay": 0.0, "decay_all": True}
    assert make_optimiser(net.named_parameters(), **settings) is None
    step_optimiser(None, YES, slides=1, clip_norm=0.0)
    set_learning_rate(None, 1.0)
    net[3].requires_grad_(True)
    optimiser = make_optimiser(net.named_parameters(), **settings)
    assert list(optimiser.master_weights()) == ["3.weight", "3.bias"]


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("moments", FORMS)
@pytest.mark.parametrize("offload", [True, False])
def test_lowered_parameters_are_the_rounded_masters(moments, offload):
    net = small_net()
    values = copied(net.state_dict())
    optimiser = optimise(net, rate=1e-5, compute_dtype=torch.bfloat16, moments=moments, offload=offload)
    assert same(optimiser.master_weights(), {name: values[name] for name in optimiser.master_weights()})
    for seed in range(30):
        add_gradients(net, seed)
        assert all(parameter.grad.dtype == torch.bfloat16 for parameter in net.parameters())
        optimiser.step()
    masters = optimiser.master_weights()
    for name, parameter in net.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert masters[name].dtype == torch.float32
        assert torch.equal(parameter, masters[name].to(torch.bfloat16))
        # steps of 1e-5 are lost in bfloat16, and add up in float32
        assert not torch.equal(masters[name], values[name])


def test_parameters_that_came_in_low_precision_have_float32_masters_and_mix_with_others():
    net = small_net()
    net[3].to(torch.bfloat16)
    optimiser = optimise(net, decay_all=True)
    assert {value.dtype for value in optimiser.master_weights().values()} == {torch.float32}
    assert [layer.weight.dtype for layer in (net[0], net[3], net[5])] == [torch.float32, torch.bfloat16, torch.float32]
    add_gradients(net, 0)
    optimiser.step()
    assert torch.equal(net[3].weight, optimiser.master_weights()["3.weight"].to(torch.bfloat16))


def test_gradients_may_be_wider_than_parameters():
    nets = [small_net(), small_net()]
    narrow, wide = (optimise(net, compute_dtype=torch.bfloat16) for net in nets)
    for parameter in nets[1].parameters():
        parameter.grad_dtype = torch.float32
    for seed in range(5):
        for net in nets:
            add_gradients(net, seed)
        assert {(p.dtype, p.grad.dtype) for p in nets[1].parameters()} == {(torch.bfloat16, torch.float32)}
        narrow.step()
        wide.step()
    assert same(narrow.master_weights(), wide.master_weights())


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("moments", "compute_dtype", "offload"), ALL_FORMS)
def test_a_restored_optimiser_goes_on_bit_by_bit(moments, compute_dtype, offload):
    form = {"moments": moments, "compute_dtype": compute_dtype}
    nets = [small_net(), small_net(seed=1)]
    saved, fresh = optimise(nets[0], offload=offload, **form), optimise(nets[1], offload=not offload, **form)
    for seed in range(3):
        add_gradients(nets[0], seed)
        saved.step()
    values, state = copied(saved.master_weights()), copied(saved.state())
    fresh.load_master_weights(values)
    fresh.restore(state)
    assert same(nets[0].state_dict(), nets[1].state_dict())
    for seed in range(3, 6):
        for net, optimiser in zip(nets, (saved, fresh), strict=True):
            add_gradients(net, seed)
            optimiser.step()
        assert same(saved.master_weights(), fresh.master_weights())
        assert same(saved.state(), fresh.state())
        assert same(nets[0].state_dict(), nets[1].state_dict())
    assert not same(saved.master_weights(), values)
    assert state["step"].item() == 3


@pytest.mark.parametrize("moments", FORMS)
def test_a_checkpoint_holds_the_state_as_it_is(moments, tmp_path):
    net = small_net()
    optimiser = optimise(net, moments=moments)
    add_gradients(net, 0)
    optimiser.step()
    save_checkpoint(tmp_path / "last.safetensors", optimiser.state(), {})
    state, _ = load_checkpoint(tmp_path / "last.safetensors")
    assert same(state, optimiser.state())
    fresh = optimise(small_net(), moments=moments)
    fresh.restore(state)
    assert same(fresh.state(), optimiser.state())


@pytest.mark.parametrize("moments", FORMS)
def test_pieces_of_a_shard_give_what_the_whole_gives(moments, monkeypatch):
    learned = []
    for elements in (2**16, 2 * 256):
        monkeypatch.setattr(optimisers, "_CPU_PIECE_ELEMENTS", elements)
        net = small_net()
        optimiser = optimise(net, moments=moments, compute_dtype=torch.bfloat16)
        for seed in range(3):
            add_gradients(net, seed)
            optimiser.step()
        learned.append(optimiser.master_weights() | optimiser.state())
    assert same(*learned)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("moments", "compute_dtype", "offload"), ALL_FORMS)
def test_where_the_gradient_is_not_finite_nothing_changes(moments, compute_dtype, offload):
    net = small_net()
    optimiser = optimise(net, moments=moments, compute_dtype=compute_dtype, offload=offload)
    for warm_up in range(3):
        before = copied(optimiser.master_weights()), copied(optimiser.state()), copied(net.state_dict())
        add_gradients(net, 7)
        net[0].weight.grad[1, 1] = torch.nan
        net[3].weight.grad[:] = torch.inf
        step_optimiser(optimiser, torch.tensor(False), slides=2, clip_norm=1.0, loss_scale=torch.tensor(8.0))
        after = optimiser.master_weights(), optimiser.state(), net.state_dict()
        assert all(same(a, b) for a, b in zip(after, before, strict=True))
        assert all(parameter.grad is None for parameter in net.parameters())
        add_gradients(net, warm_up)
        optimiser.step()
        assert not same(optimiser.master_weights(), before[0])
        assert optimiser.state()["step"].item() == warm_up + 1


def test_gradients_are_averaged_unscaled_clipped_and_forgotten():
    def after(factor=1.0, clip=None, **arguments):
        net = small_net()
        optimiser = optimise(net)
        for seed in range(3):
            add_gradients(net, seed, size=factor)
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            step_optimiser(optimiser, **{"finite": YES, "slides": 1, "clip_norm": 0.0} | arguments)
            assert all(parameter.grad is None for parameter in net.parameters())
        return optimiser.master_weights()

    def close(ours, theirs):
        return all(torch.allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6) for name in theirs)

    plain = after()
    # AdamW hardly sees a factor of all gradients; its epsilon does, and clipping one step more than another
    assert same(after(factor=4.0, slides=4), plain)
    assert same(after(factor=1024.0, loss_scale=torch.tensor(1024.0)), plain)
    assert same(after(factor=2048.0, slides=2, loss_scale=torch.tensor(1024.0)), plain)
    assert close(after(clip_norm=11.0), after(clip=11.0))
    assert close(after(factor=64.0, clip_norm=11.0, loss_scale=torch.tensor(64.0)), after(clip=11.0))
    assert not close(after(clip_norm=11.0), plain)
    assert same(after(clip_norm=1e6), plain)
    assert same(after(finite=None), plain)


def test_the_first_step_follows_the_factor_where_epsilon_matters():
    parameter = nn.Parameter(torch.zeros(2))
    optimiser = AdamW({"x": parameter}, device=CPU, weight_decay=0.0, decay_all=True)
    optimiser.set_learning_rate(1.0)
    parameter.grad = torch.tensor([4e-8, 0.0])
    optimiser.step(factor=0.25)
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.5, 0.0]))


@pytest.mark.parametrize("moments", FORMS)
def test_a_small_net_learns_as_well_with_moments_of_few_bits(moments):
    torch.manual_seed(3)
    x = torch.randn(256, 3)
    y = (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:]
    losses = {}
    for form in ("float32", moments):
        net = small_net()
        optimiser = optimise(net, rate=3e-3, weight_decay=1e-4, moments=form)
        draw = torch.Generator().manual_seed(0)
        history = []
        for _ in range(500):
            rows = torch.randint(256, (32,), generator=draw)
            loss = (net(x[rows]) - y[rows]).square().mean()
            loss.backward()
            optimiser.step()
            history.append(loss.detach())
        losses[form] = torch.stack(history).view(10, 50).mean(dim=1)
    assert losses["float32"][-1] < 0.05 * losses["float32"][0]
    torch.testing.assert_close(losses[moments], losses["float32"], rtol=0.25, atol=2e-3)


def test_another_form_of_moments_is_refused():
    for theirs, ours in itertools.permutations(FORMS, 2):
        state = optimise(small_net(), moments=theirs).state()
        with pytest.raises(CheckpointError, match=f"moments are {theirs}, and the optimiser's are {ours}") as error:
            optimise(small_net(), moments=ours).restore(state)
        assert f'optimiser.moments = "{theirs}"' in error.value.hint


def test_moments_of_other_parameters_are_refused_and_nothing_is_changed():
    renamed = {f"x{name}": parameter for name, parameter in small_net().named_parameters()}
    other = AdamW(renamed, device=CPU, weight_decay=0.0, decay_all=False)  # of the same sizes
    larger = optimise(nn.Sequential(nn.Linear(99, 99)))
    good = optimise(small_net()).state()
    without_step = {name: tensor for name, tensor in good.items() if name != "step"}
    for state in (other.state(), larger.state(), without_step, {}):
        optimiser = optimise(small_net())
        before = copied(optimiser.state())
        with pytest.raises(CheckpointError, match="those of other parameters"):
            optimiser.restore(state)
        assert same(optimiser.state(), before)
    optimise(small_net()).restore(good)


def test_moments_that_lie_otherwise_are_refused_and_it_says_who_may_have_laid_them(monkeypatch):
    before = optimise(small_net()).state()
    monkeypatch.setattr(shards, "_OWN_SHARD_ELEMENTS", 200)
    with pytest.raises(CheckpointError, match="or lie otherwise") as error:
        optimise(small_net()).restore(before)
    assert "another version of tapfm: begin anew" in error.value.hint


def test_masters_that_do_not_fit_are_refused():
    optimiser = optimise(small_net())
    values = copied(optimiser.master_weights())
    for wrong in ({"0.weight": torch.zeros(1, 3)}, {"3.bias": torch.zeros(())}):
        with pytest.raises(CheckpointError, match=rf"{next(iter(wrong))} has another shape, or is missing"):
            optimiser.load_master_weights(values | wrong)
    del values["5.bias"]
    with pytest.raises(CheckpointError, match=r"5\.bias has another shape, or is missing"):
        optimiser.load_master_weights(values)


@pytest.mark.parametrize("offload", [True, False])
def test_loaded_masters_are_computed_with(offload):
    net = small_net()
    optimiser = optimise(net, compute_dtype=torch.bfloat16, offload=offload)
    values = {name: value.double() for name, value in small_net(seed=5).state_dict().items()}
    optimiser.load_master_weights(values)
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, values[name].to(torch.bfloat16))
        assert torch.equal(optimiser.master_weights()[name], values[name].float())


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("moments", FORMS)
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_the_bytes_of_a_parameter_are_what_is_said(moments, compute_dtype):
    net = nn.Linear(1024, 8, bias=False)
    optimiser = optimise(net, moments=moments, compute_dtype=compute_dtype)
    said = bytes_per_parameter(low_precision=compute_dtype is not None, moments=moments, offload=False)
    found = {
        "weights": sum(shard.working.nbytes for shard in optimiser.shards),
        "master weights": sum(shard.master.nbytes for shard in optimiser.shards if shard.master is not None),
        "moments": sum(tensor.nbytes for shard in optimiser.shards for tensor in shard.moments.values()),
    }
    assert found == {name: size * net.weight.numel() for name, size in said.items()}


@pytest.mark.parametrize("moments", FORMS)
def test_offloaded_there_is_only_what_is_computed_with(moments):
    for low_precision, size in ((True, 2), (False, 4)):
        assert sum(bytes_per_parameter(low_precision=low_precision, moments=moments, offload=True).values()) == size


@pytest.mark.filterwarnings("default")  # the compiler has warnings of its own
@pytest.mark.parametrize("moments", FORMS)
def test_one_graph_serves_every_shard_rate_and_step(moments, monkeypatch):
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(shards, "SHARD_ELEMENTS", 1000)
    monkeypatch.setattr(optimisers, "_update_shard", torch.compile(update_shard, dynamic=True, backend=keep))
    nets = [nn.Sequential(*(nn.Linear(n, n) for n in (20, 25, 30, 40))) for _ in range(2)]
    nets[1] = copy.deepcopy(nets[0])
    compiled = optimise(nets[0], moments=moments, compute_dtype=torch.bfloat16)
    monkeypatch.undo()
    plain = optimise(nets[1], moments=moments, compute_dtype=torch.bfloat16)
    assert len({shard.working.shape for shard in compiled.shards}) > 2
    for seed in range(4):
        for net, optimiser in zip(nets, (compiled, plain), strict=True):
            optimiser.set_learning_rate(1e-3 * seed)
            add_gradients(net, seed)
            step_optimiser(optimiser, torch.tensor(seed != 2), slides=seed + 1, clip_norm=1.0)
    assert len(graphs) == 1
    for mine, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-4)

"""AdamW with all storage options, compared with torch's, and the learning rate schedule."""

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
FINITE = torch.tensor(True)
FORMATS = ("float32", "bfloat16", "int8")
ALL_STORAGE_OPTIONS = tuple(itertools.product(FORMATS, (None, torch.bfloat16), (False, True)))


@given(
    first=st.integers(1, 12), factor=st.integers(1, 3), highest=st.floats(1e-7, 1e-1), lowest=st.sampled_from([0, 1e-8])
)
def test_schedule_equals_cosine_annealing_with_warm_restarts_of_torch(first, factor, highest, lowest):
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=highest)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimiser, first, factor, eta_min=lowest)
    ours = LearningRateSchedule(first, factor)
    for epoch in range(40):
        assert ours.rate(epoch, highest, lowest) == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-9, abs=1e-15)
        optimiser.step()
        theirs.step()


def test_default_schedule_restarts_after_10_and_30_epochs():
    rates = [LearningRateSchedule(10, 2).rate(epoch, 1.0) for epoch in range(31)]
    assert [epoch for epoch, rate in enumerate(rates) if rate == 1.0] == [0, 10, 30]


def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 20), nn.GELU(), nn.Linear(20, 1))


def make_adamw(net, *, rate=1e-2, weight_decay=0.1, decay_all=False, **storage):
    optimiser = AdamW(
        dict(net.named_parameters()), device=CPU, weight_decay=weight_decay, decay_all=decay_all, **storage
    )
    optimiser.set_learning_rate(rate)
    return optimiser


def add_gradients(net, seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(net.parameters()):
        gradient = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * size * 10.0**-number
        parameter.grad = gradient.to(parameter.dtype).to(getattr(parameter, "grad_dtype", parameter.dtype))


def clone_all(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def are_equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(params=["shared shards", "own shards"])
def small_shards(monkeypatch, request):
    monkeypatch.setattr(shards, "MAX_SHARD_ELEMENTS", 1000)
    if request.param == "own shards":
        monkeypatch.setattr(shards, "_OWN_SHARD_ELEMENTS", 200)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_updates_equal_adamw_of_torch(dtype, rtol, decay_all, offload):
    ours, theirs = small_net().to(dtype), small_net().to(dtype)
    our_optimiser = make_adamw(ours, decay_all=decay_all, offload=offload)
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


def test_parameters_become_views_of_shards_with_the_same_values():
    net = small_net()
    before, values = list(net.parameters()), clone_all(net.state_dict())
    optimiser = make_adamw(net, decay_all=True)
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    assert are_equal(net.state_dict(), values)
    assert len({parameter.untyped_storage().data_ptr() for parameter in net.parameters()}) == 1
    assert len(optimiser.shards) == 1
    # updating the shard updates the parameters without a copy
    add_gradients(net, 0)
    optimiser.step()
    assert not are_equal(net.state_dict(), values)


def test_parameters_start_at_block_boundaries_of_limited_shards(monkeypatch):
    monkeypatch.setattr(shards, "MAX_SHARD_ELEMENTS", 1024)
    sizes = {"a": 3, "b": 700, "c": 300, "large": 5000, "d": 1024, "e": 1}
    optimiser = AdamW(
        {name: nn.Parameter(torch.full((size,), float(size))) for name, size in sizes.items()},
        device=CPU,
        weight_decay=0.0,
        decay_all=True,
    )
    names = [[part.name for part in shard.slices] for shard in optimiser.shards]
    assert names == [["a", "b"], ["c"], ["large"], ["d"], ["e"]]
    assert all(part.start % 256 == 0 for shard in optimiser.shards for part in shard.slices)
    assert all((values == sizes[name]).all() for name, values in optimiser.master_weights().items())


def test_large_parameter_has_its_own_shard_and_its_gradient_is_not_copied(monkeypatch):
    monkeypatch.setattr(shards, "_OWN_SHARD_ELEMENTS", 512)
    parameters = {
        "a": nn.Parameter(torch.zeros(3)),
        "b": nn.Parameter(torch.zeros(2, 256)),
        "c": nn.Parameter(torch.zeros(2)),
    }
    optimiser = AdamW(parameters, device=CPU, weight_decay=0.0, decay_all=True)
    assert [[part.name for part in shard.slices] for shard in optimiser.shards] == [["b"], ["a", "c"]]
    own, shared = optimiser.shards
    values = torch.arange(512.0).view(2, 256)
    parameters["b"].grad = gradient = values.clone()
    assert take_flat_gradient(own).data_ptr() == gradient.data_ptr()
    assert parameters["b"].grad is None
    parameters["b"].grad = values.t().contiguous().t()  # other strides than the parameter
    assert torch.equal(take_flat_gradient(own), values)
    assert torch.equal(take_flat_gradient(own), torch.zeros(2, 256))  # no gradient
    parameters["c"].grad = torch.ones(2)
    assert take_flat_gradient(shared).view(-1)[[0, 255, 256, 257, 258]].tolist() == [0, 0, 1, 1, 0]


def test_decay_all_applies_weight_decay_to_biases_and_norms():
    for decay_all in (True, False):
        net = small_net()
        before = clone_all(net.state_dict())
        optimiser = make_adamw(net, rate=0.5, decay_all=decay_all)
        optimiser.step()  # without gradients, only weight decay changes the weights
        for name, value in net.state_dict().items():
            factor = 1 - 0.5 * 0.1 if value.ndim > 1 or decay_all else 1.0
            torch.testing.assert_close(value, before[name] * factor)


def test_only_trainable_parameters_are_optimised():
    net = small_net().requires_grad_(False)
    settings = {"weight_decay": 0.0, "decay_all": True}
    assert make_optimiser(net.named_parameters(), **settings) is None
    step_optimiser(None, FINITE, slides=1, clip_norm=0.0)
    set_learning_rate(None, 1.0)
    net[3].requires_grad_(True)
    optimiser = make_optimiser(net.named_parameters(), **settings)
    assert list(optimiser.master_weights()) == ["3.weight", "3.bias"]


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("offload", [True, False])
def test_low_precision_parameters_are_rounded_master_weights(moments, offload):
    net = small_net()
    values = clone_all(net.state_dict())
    optimiser = make_adamw(net, rate=1e-5, compute_dtype=torch.bfloat16, moments=moments, offload=offload)
    assert are_equal(optimiser.master_weights(), {name: values[name] for name in optimiser.master_weights()})
    for seed in range(30):
        add_gradients(net, seed)
        assert all(parameter.grad.dtype == torch.bfloat16 for parameter in net.parameters())
        optimiser.step()
    masters = optimiser.master_weights()
    for name, parameter in net.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert masters[name].dtype == torch.float32
        assert torch.equal(parameter, masters[name].to(torch.bfloat16))
        # steps of 1e-5 would be lost in bfloat16
        assert not torch.equal(masters[name], values[name])


def test_bfloat16_parameters_get_float32_master_weights():
    net = small_net()
    net[3].to(torch.bfloat16)
    optimiser = make_adamw(net, decay_all=True)
    assert {value.dtype for value in optimiser.master_weights().values()} == {torch.float32}
    assert [layer.weight.dtype for layer in (net[0], net[3], net[5])] == [torch.float32, torch.bfloat16, torch.float32]
    add_gradients(net, 0)
    optimiser.step()
    assert torch.equal(net[3].weight, optimiser.master_weights()["3.weight"].to(torch.bfloat16))


def test_gradients_may_have_higher_precision_than_parameters():
    nets = [small_net(), small_net()]
    narrow, wide = (make_adamw(net, compute_dtype=torch.bfloat16) for net in nets)
    for parameter in nets[1].parameters():
        parameter.grad_dtype = torch.float32
    for seed in range(5):
        for net in nets:
            add_gradients(net, seed)
        assert {(p.dtype, p.grad.dtype) for p in nets[1].parameters()} == {(torch.bfloat16, torch.float32)}
        narrow.step()
        wide.step()
    assert are_equal(narrow.master_weights(), wide.master_weights())


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("moments", "compute_dtype", "offload"), ALL_STORAGE_OPTIONS)
def test_restored_optimiser_continues_bit_exact(moments, compute_dtype, offload):
    storage = {"moments": moments, "compute_dtype": compute_dtype}
    nets = [small_net(), small_net(seed=1)]
    saved, fresh = make_adamw(nets[0], offload=offload, **storage), make_adamw(nets[1], offload=not offload, **storage)
    for seed in range(3):
        add_gradients(nets[0], seed)
        saved.step()
    values, state = clone_all(saved.master_weights()), clone_all(saved.state())
    fresh.load_master_weights(values)
    fresh.restore(state)
    assert are_equal(nets[0].state_dict(), nets[1].state_dict())
    for seed in range(3, 6):
        for net, optimiser in zip(nets, (saved, fresh), strict=True):
            add_gradients(net, seed)
            optimiser.step()
        assert are_equal(saved.master_weights(), fresh.master_weights())
        assert are_equal(saved.state(), fresh.state())
        assert are_equal(nets[0].state_dict(), nets[1].state_dict())
    assert not are_equal(saved.master_weights(), values)
    assert state["step"].item() == 3


@pytest.mark.parametrize("moments", FORMATS)
def test_checkpoint_contains_the_whole_state(moments, tmp_path):
    net = small_net()
    optimiser = make_adamw(net, moments=moments)
    add_gradients(net, 0)
    optimiser.step()
    save_checkpoint(tmp_path / "last.safetensors", optimiser.state(), {})
    state, _ = load_checkpoint(tmp_path / "last.safetensors")
    assert are_equal(state, optimiser.state())
    fresh = make_adamw(small_net(), moments=moments)
    fresh.restore(state)
    assert are_equal(fresh.state(), optimiser.state())


@pytest.mark.parametrize("moments", FORMATS)
def test_updates_in_pieces_equal_updates_of_whole_shards(moments, monkeypatch):
    results = []
    for elements in (2**16, 2 * 256):
        monkeypatch.setattr(optimisers, "_CPU_PIECE_ELEMENTS", elements)
        net = small_net()
        optimiser = make_adamw(net, moments=moments, compute_dtype=torch.bfloat16)
        for seed in range(3):
            add_gradients(net, seed)
            optimiser.step()
        results.append(optimiser.master_weights() | optimiser.state())
    assert are_equal(*results)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("moments", "compute_dtype", "offload"), ALL_STORAGE_OPTIONS)
def test_non_finite_gradient_changes_nothing(moments, compute_dtype, offload):
    net = small_net()
    optimiser = make_adamw(net, moments=moments, compute_dtype=compute_dtype, offload=offload)
    for warm_up in range(3):
        before = clone_all(optimiser.master_weights()), clone_all(optimiser.state()), clone_all(net.state_dict())
        add_gradients(net, 7)
        net[0].weight.grad[1, 1] = torch.nan
        net[3].weight.grad[:] = torch.inf
        step_optimiser(optimiser, torch.tensor(False), slides=2, clip_norm=1.0, loss_scale=torch.tensor(8.0))
        after = optimiser.master_weights(), optimiser.state(), net.state_dict()
        assert all(are_equal(a, b) for a, b in zip(after, before, strict=True))
        assert all(parameter.grad is None for parameter in net.parameters())
        add_gradients(net, warm_up)
        optimiser.step()
        assert not are_equal(optimiser.master_weights(), before[0])
        assert optimiser.state()["step"].item() == warm_up + 1


def test_gradients_are_averaged_unscaled_clipped_and_cleared():
    def after(factor=1.0, clip=None, **arguments):
        net = small_net()
        optimiser = make_adamw(net)
        for seed in range(3):
            add_gradients(net, seed, size=factor)
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            step_optimiser(optimiser, **{"finite": FINITE, "slides": 1, "clip_norm": 0.0} | arguments)
            assert all(parameter.grad is None for parameter in net.parameters())
        return optimiser.master_weights()

    def close(ours, theirs):
        return all(torch.allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6) for name in theirs)

    plain = after()
    # AdamW is almost invariant to the scale of the gradients, except for epsilon and clipping
    assert are_equal(after(factor=4.0, slides=4), plain)
    assert are_equal(after(factor=1024.0, loss_scale=torch.tensor(1024.0)), plain)
    assert are_equal(after(factor=2048.0, slides=2, loss_scale=torch.tensor(1024.0)), plain)
    assert close(after(clip_norm=11.0), after(clip=11.0))
    assert close(after(factor=64.0, clip_norm=11.0, loss_scale=torch.tensor(64.0)), after(clip=11.0))
    assert not close(after(clip_norm=11.0), plain)
    assert are_equal(after(clip_norm=1e6), plain)
    assert are_equal(after(finite=None), plain)


def test_factor_scales_tiny_gradients_before_epsilon():
    parameter = nn.Parameter(torch.zeros(2))
    optimiser = AdamW({"x": parameter}, device=CPU, weight_decay=0.0, decay_all=True)
    optimiser.set_learning_rate(1.0)
    parameter.grad = torch.tensor([4e-8, 0.0])
    optimiser.step(factor=0.25)
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.5, 0.0]))


@pytest.mark.parametrize("moments", FORMATS)
def test_training_with_low_precision_moments_follows_float32(moments):
    torch.manual_seed(3)
    x = torch.randn(256, 3)
    y = (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:]
    losses = {}
    for moment_format in ("float32", moments):
        net = small_net()
        optimiser = make_adamw(net, rate=3e-3, weight_decay=1e-4, moments=moment_format)
        generator = torch.Generator().manual_seed(0)
        history = []
        for _ in range(500):
            rows = torch.randint(256, (32,), generator=generator)
            loss = (net(x[rows]) - y[rows]).square().mean()
            loss.backward()
            optimiser.step()
            history.append(loss.detach())
        losses[moment_format] = torch.stack(history).view(10, 50).mean(dim=1)
    assert losses["float32"][-1] < 0.05 * losses["float32"][0]
    torch.testing.assert_close(losses[moments], losses["float32"], rtol=0.25, atol=2e-3)


def test_checkpoint_with_another_moment_format_is_rejected():
    for theirs, ours in itertools.permutations(FORMATS, 2):
        state = make_adamw(small_net(), moments=theirs).state()
        with pytest.raises(CheckpointError, match=f"has {theirs} moments, but the optimiser uses {ours}") as error:
            make_adamw(small_net(), moments=ours).restore(state)
        assert f'optimiser.moments = "{theirs}"' in error.value.hint


def test_checkpoint_of_other_parameters_is_rejected_without_changes():
    renamed = {f"x{name}": parameter for name, parameter in small_net().named_parameters()}
    other = AdamW(renamed, device=CPU, weight_decay=0.0, decay_all=False)  # same sizes
    larger = make_adamw(nn.Sequential(nn.Linear(99, 99)))
    good = make_adamw(small_net()).state()
    without_step = {name: tensor for name, tensor in good.items() if name != "step"}
    for state in (other.state(), larger.state(), without_step, {}):
        optimiser = make_adamw(small_net())
        before = clone_all(optimiser.state())
        with pytest.raises(CheckpointError, match="belong to other parameters"):
            optimiser.restore(state)
        assert are_equal(optimiser.state(), before)
    make_adamw(small_net()).restore(good)


def test_checkpoint_with_another_layout_is_rejected(monkeypatch):
    before = make_adamw(small_net()).state()
    monkeypatch.setattr(shards, "_OWN_SHARD_ELEMENTS", 200)
    with pytest.raises(CheckpointError, match="different layout") as error:
        make_adamw(small_net()).restore(before)
    assert "another version of tapfm" in error.value.hint


def test_master_weights_with_other_shapes_are_rejected():
    optimiser = make_adamw(small_net())
    values = clone_all(optimiser.master_weights())
    for wrong in ({"0.weight": torch.zeros(1, 3)}, {"3.bias": torch.zeros(())}):
        with pytest.raises(CheckpointError, match=rf"{next(iter(wrong))} is missing or has a different shape"):
            optimiser.load_master_weights(values | wrong)
    del values["5.bias"]
    with pytest.raises(CheckpointError, match=r"5\.bias is missing or has a different shape"):
        optimiser.load_master_weights(values)


@pytest.mark.parametrize("offload", [True, False])
def test_loaded_master_weights_are_copied_to_the_parameters(offload):
    net = small_net()
    optimiser = make_adamw(net, compute_dtype=torch.bfloat16, offload=offload)
    values = {name: value.double() for name, value in small_net(seed=5).state_dict().items()}
    optimiser.load_master_weights(values)
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, values[name].to(torch.bfloat16))
        assert torch.equal(optimiser.master_weights()[name], values[name].float())


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_bytes_per_parameter_match_the_tensors(moments, compute_dtype):
    net = nn.Linear(1024, 8, bias=False)
    optimiser = make_adamw(net, moments=moments, compute_dtype=compute_dtype)
    expected = bytes_per_parameter(low_precision=compute_dtype is not None, moments=moments, offload=False)
    found = {
        "weights": sum(shard.working.nbytes for shard in optimiser.shards),
        "master weights": sum(shard.master.nbytes for shard in optimiser.shards if shard.master is not None),
        "moments": sum(tensor.nbytes for shard in optimiser.shards for tensor in shard.moments.values()),
    }
    assert found == {name: size * net.weight.numel() for name, size in expected.items()}


@pytest.mark.parametrize("moments", FORMATS)
def test_offloading_leaves_only_weights_on_the_device(moments):
    for low_precision, size in ((True, 2), (False, 4)):
        assert sum(bytes_per_parameter(low_precision=low_precision, moments=moments, offload=True).values()) == size


@pytest.mark.filterwarnings("default")  # the compiler issues warnings
@pytest.mark.parametrize("moments", FORMATS)
def test_compiled_update_is_compiled_once(moments, monkeypatch):
    graphs = []

    def record_graph(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(shards, "MAX_SHARD_ELEMENTS", 1000)
    monkeypatch.setattr(optimisers, "_update_shard", torch.compile(update_shard, dynamic=True, backend=record_graph))
    nets = [nn.Sequential(*(nn.Linear(n, n) for n in (20, 25, 30, 40))) for _ in range(2)]
    nets[1] = copy.deepcopy(nets[0])
    compiled = make_adamw(nets[0], moments=moments, compute_dtype=torch.bfloat16)
    monkeypatch.undo()
    plain = make_adamw(nets[1], moments=moments, compute_dtype=torch.bfloat16)
    assert len({shard.working.shape for shard in compiled.shards}) > 2
    for seed in range(4):
        for net, optimiser in zip(nets, (compiled, plain), strict=True):
            optimiser.set_learning_rate(1e-3 * seed)
            add_gradients(net, seed)
            step_optimiser(optimiser, torch.tensor(seed != 2), slides=seed + 1, clip_norm=1.0)
    assert len(graphs) == 1
    for mine, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-4)

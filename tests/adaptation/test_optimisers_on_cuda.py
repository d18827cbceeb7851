"""What only a GPU can show of the optimiser: fused kernels, no waiting, what lies where."""

import itertools

import pytest
import torch
from torch import nn

from tapfm.adaptation.optimisers import AdamW, bytes_per_parameter, step_optimiser

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

FORMS = ("float32", "bfloat16", "int8")
GPU = torch.device("cuda")
WAYS = list(itertools.product(FORMS, (False, True), (False, True)))


@pytest.fixture
def waiting_is_an_error():
    def switch(mode):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)

    yield switch
    torch.cuda.set_sync_debug_mode("default")


def matrices(count=6, side=256, device="cpu"):
    draw = torch.Generator().manual_seed(0)
    sizes = [(side + 8 * number, side) for number in range(count)]
    named = {f"{n}.weight": nn.Parameter(torch.randn(s, generator=draw).to(device)) for n, s in enumerate(sizes)}
    return named | {f"{n}.bias": nn.Parameter(torch.randn(s[0], generator=draw)) for n, s in enumerate(sizes)}


def optimise(parameters, device=GPU, **form):
    optimiser = AdamW(parameters, device=device, weight_decay=0.1, decay_all=False, **form)
    optimiser.set_learning_rate(1e-2)
    return optimiser


def add_gradients(parameters, seed):
    draw = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter.device, parameter.dtype)


def learned(device=GPU, steps=5, **form):
    parameters = matrices()
    optimiser = optimise(parameters, device, **form)
    for seed in range(steps):
        add_gradients(parameters, seed)
        finite = torch.tensor(seed != 2, device=device)
        step_optimiser(optimiser, finite, slides=2, clip_norm=1.0, loss_scale=torch.tensor(4.0, device=device))
    return optimiser, parameters


def on_cpu(tensors):
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def assert_close(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr("tapfm.adaptation.shards.SHARD_ELEMENTS", 2**17)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.filterwarnings("default")  # the compiler has warnings of its own
@pytest.mark.parametrize(
    ("moments", "compute_dtype", "offload", "compiled"),
    list(itertools.product(FORMS, (None, torch.bfloat16), (False, True), (False, True))),
)
def test_the_gpu_learns_what_the_cpu_does(moments, compute_dtype, offload, compiled):
    torch._dynamo.reset()
    form = {"moments": moments, "compute_dtype": compute_dtype}
    theirs, _ = learned(torch.device("cpu"), **form)
    ours, parameters = learned(offload=offload, compiled=compiled, **form)
    assert {parameter.device.type for parameter in parameters.values()} == {"cuda"}
    if moments == "float32":
        assert_close(on_cpu(ours.master_weights()), on_cpu(theirs.master_weights()), rtol=1e-4, atol=1e-5)
    else:  # a few moments lie on an edge, and are rounded to the other neighbour
        apart = torch.cat(
            [(ours.master_weights()[name].cpu() - theirs.master_weights()[name]).abs().view(-1) for name in parameters]
        )
        assert (apart > 2e-5).double().mean() < 1e-3
        assert apart.max() < 2e-2
    assert ours.state()["step"].item() == 4
    for name, parameter in parameters.items():
        assert torch.equal(parameter.detach().cpu(), ours.master_weights()[name].cpu().to(parameter.dtype))


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("moments", "compute_dtype"), list(itertools.product(FORMS, (None, torch.bfloat16))))
def test_offloaded_it_learns_the_same_bit_by_bit_and_goes_on_elsewhere(moments, compute_dtype):
    form = {"moments": moments, "compute_dtype": compute_dtype}
    stays, _ = learned(**form)
    goes, parameters = learned(offload=True, **form)
    assert all(tensor.is_pinned() for shard in goes.shards for tensor in shard.moments.values())
    for ours, theirs in ((goes.master_weights(), stays.master_weights()), (goes.state(), stays.state())):
        assert_close(on_cpu(ours), on_cpu(theirs), rtol=0, atol=0)
    others = matrices()
    fresh = optimise(others, **form)
    fresh.load_master_weights(on_cpu(goes.master_weights()))
    fresh.restore(on_cpu(goes.state()))
    for optimiser, of in ((goes, parameters), (fresh, others)):
        add_gradients(of, 9)
        optimiser.step()
    assert_close(on_cpu(fresh.master_weights()), on_cpu(goes.master_weights()), rtol=0, atol=0)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("moments", "offload", "compiled"), list(itertools.product(FORMS, (False, True), (False, True)))
)
def test_a_step_never_waits_for_the_gpu(moments, offload, compiled, waiting_is_an_error):
    torch._dynamo.reset()
    parameters = matrices()
    optimiser = optimise(parameters, compute_dtype=torch.bfloat16, moments=moments, offload=offload, compiled=compiled)
    finite, loss_scale = torch.tensor(True, device=GPU), torch.tensor(4.0, device=GPU)
    for mode in ("default", "error"):  # the first step compiles
        add_gradients(parameters, 0)
        waiting_is_an_error(mode)
        optimiser.set_learning_rate(1e-3)
        step_optimiser(optimiser, finite, slides=3, clip_norm=1.0, loss_scale=loss_scale)
    waiting_is_an_error("default")
    assert optimiser.state()["step"].item() == 2


@pytest.mark.parametrize("moments", FORMS)
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("low_precision", [True, False])
def test_the_memory_of_a_parameter_is_what_is_said(moments, offload, low_precision):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    parameters = {str(n): nn.Parameter(torch.zeros(1024, 1024)) for n in range(24)}
    dtype = torch.bfloat16 if low_precision else None
    optimiser = optimise(parameters, compute_dtype=dtype, moments=moments, offload=offload)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    taken = torch.cuda.memory_allocated() - before
    said = sum(bytes_per_parameter(low_precision=low_precision, moments=moments, offload=offload).values()) + (
        2 if low_precision else 4
    )
    assert taken / (24 * 2**20) == pytest.approx(said, rel=0.02)
    del optimiser


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("compiled", [True, False])
def test_the_memory_of_an_offloaded_step_is_that_of_one_shard(compiled):
    def extra_bytes(shards):
        parameters = {str(n): nn.Parameter(torch.zeros(2048, 2048)) for n in range(shards)}
        optimiser = optimise(parameters, compute_dtype=torch.bfloat16, offload=True, compiled=compiled)
        assert len(optimiser.shards) == shards
        for _ in range(2):  # the first step compiles
            for parameter in parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            optimiser.step()
        return torch.cuda.max_memory_allocated() - before

    few = extra_bytes(3)
    assert extra_bytes(12) <= few * 1.01
    if compiled:  # master and two moments: no copy of the gradient, no other temporary
        assert few <= (4 + 8) * 2**22 * 1.1

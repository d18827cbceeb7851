"""AdamW on a GPU: compiled updates, no synchronisation, offloading and memory."""

import itertools

import pytest
import torch
from torch import nn

from tapfm.adaptation.optimisers import AdamW, bytes_per_parameter, step_optimiser

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

FORMATS = ("float32", "bfloat16", "int8")
GPU = torch.device("cuda")


@pytest.fixture
def set_sync_debug_mode():
    def set_mode(mode):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)

    yield set_mode
    torch.cuda.set_sync_debug_mode("default")


def matrices(count=6, side=256, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    sizes = [(side + 8 * number, side) for number in range(count)]
    named = {f"{n}.weight": nn.Parameter(torch.randn(s, generator=generator).to(device)) for n, s in enumerate(sizes)}
    return named | {f"{n}.bias": nn.Parameter(torch.randn(s[0], generator=generator)) for n, s in enumerate(sizes)}


def make_adamw(parameters, device=GPU, **storage):
    optimiser = AdamW(parameters, device=device, weight_decay=0.1, decay_all=False, **storage)
    optimiser.set_learning_rate(1e-2)
    return optimiser


def add_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)


def train(device=GPU, steps=5, **storage):
    parameters = matrices()
    optimiser = make_adamw(parameters, device, **storage)
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
    monkeypatch.setattr("tapfm.adaptation.shards.MAX_SHARD_ELEMENTS", 2**17)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.filterwarnings("default")  # the compiler issues warnings
@pytest.mark.parametrize(
    ("moments", "compute_dtype", "offload", "compiled"),
    list(itertools.product(FORMATS, (None, torch.bfloat16), (False, True), (False, True))),
)
def test_updates_on_gpu_and_cpu_agree(moments, compute_dtype, offload, compiled):
    torch._dynamo.reset()
    storage = {"moments": moments, "compute_dtype": compute_dtype}
    theirs, _ = train(torch.device("cpu"), **storage)
    ours, parameters = train(offload=offload, compiled=compiled, **storage)
    assert {parameter.device.type for parameter in parameters.values()} == {"cuda"}
    if moments == "float32":
        assert_close(on_cpu(ours.master_weights()), on_cpu(theirs.master_weights()), rtol=1e-4, atol=1e-5)
    else:  # small differences may change the rounding of a few moments
        differences = torch.cat(
            [(ours.master_weights()[name].cpu() - theirs.master_weights()[name]).abs().view(-1) for name in parameters]
        )
        assert (differences > 2e-5).double().mean() < 1e-3
        assert differences.max() < 2e-2
    assert ours.state()["step"].item() == 4
    for name, parameter in parameters.items():
        assert torch.equal(parameter.detach().cpu(), ours.master_weights()[name].cpu().to(parameter.dtype))


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("moments", "compute_dtype"), list(itertools.product(FORMATS, (None, torch.bfloat16))))
def test_offloaded_updates_are_bit_exact_and_can_be_restored(moments, compute_dtype):
    storage = {"moments": moments, "compute_dtype": compute_dtype}
    on_gpu, _ = train(**storage)
    offloaded, parameters = train(offload=True, **storage)
    assert all(tensor.is_pinned() for shard in offloaded.shards for tensor in shard.moments.values())
    for ours, theirs in ((offloaded.master_weights(), on_gpu.master_weights()), (offloaded.state(), on_gpu.state())):
        assert_close(on_cpu(ours), on_cpu(theirs), rtol=0, atol=0)
    others = matrices()
    fresh = make_adamw(others, **storage)
    fresh.load_master_weights(on_cpu(offloaded.master_weights()))
    fresh.restore(on_cpu(offloaded.state()))
    for optimiser, named in ((offloaded, parameters), (fresh, others)):
        add_gradients(named, 9)
        optimiser.step()
    assert_close(on_cpu(fresh.master_weights()), on_cpu(offloaded.master_weights()), rtol=0, atol=0)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("moments", "offload", "compiled"), list(itertools.product(FORMATS, (False, True), (False, True)))
)
def test_step_does_not_synchronise(moments, offload, compiled, set_sync_debug_mode):
    torch._dynamo.reset()
    parameters = matrices()
    optimiser = make_adamw(
        parameters, compute_dtype=torch.bfloat16, moments=moments, offload=offload, compiled=compiled
    )
    finite, loss_scale = torch.tensor(True, device=GPU), torch.tensor(4.0, device=GPU)
    for mode in ("default", "error"):  # the first step compiles
        add_gradients(parameters, 0)
        set_sync_debug_mode(mode)
        optimiser.set_learning_rate(1e-3)
        step_optimiser(optimiser, finite, slides=3, clip_norm=1.0, loss_scale=loss_scale)
    set_sync_debug_mode("default")
    assert optimiser.state()["step"].item() == 2


@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("low_precision", [True, False])
def test_bytes_per_parameter_match_the_gpu_memory(moments, offload, low_precision):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    parameters = {str(n): nn.Parameter(torch.zeros(1024, 1024)) for n in range(24)}
    dtype = torch.bfloat16 if low_precision else None
    optimiser = make_adamw(parameters, compute_dtype=dtype, moments=moments, offload=offload)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    allocated = torch.cuda.memory_allocated() - before
    expected = sum(bytes_per_parameter(low_precision=low_precision, moments=moments, offload=offload).values()) + (
        2 if low_precision else 4
    )
    assert allocated / (24 * 2**20) == pytest.approx(expected, rel=0.02)
    del optimiser


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("compiled", [True, False])
def test_offloaded_step_needs_the_memory_of_one_shard(compiled):
    def extra_bytes(shards):
        parameters = {str(n): nn.Parameter(torch.zeros(2048, 2048)) for n in range(shards)}
        optimiser = make_adamw(parameters, compute_dtype=torch.bfloat16, offload=True, compiled=compiled)
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
    if compiled:  # master weights and two moments, but no copy of the gradient
        assert few <= (4 + 8) * 2**22 * 1.1

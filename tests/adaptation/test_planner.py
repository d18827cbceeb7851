"""Step plans: predicted against measured memory, and the choice of the strategy."""

import dataclasses
import math
import weakref
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import POSITIVE, TASK
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.encoder_shape import EncoderShape
from tapfm.adaptation.plan_text import describe_plan
from tapfm.adaptation.planner import _build_plan as build_plan
from tapfm.adaptation.planner import _usable_bytes as usable_bytes
from tapfm.adaptation.planner import plan_step, predict_step
from tapfm.adaptation.step_coefficients import EAGER
from tapfm.adaptation.step_costs import (
    GIB,
    RECOMPUTE_LEVELS,
    OptimiserStorage,
    PlannerInput,
    compute_chunk_cost,
    compute_graph_cost,
)
from tapfm.adaptation.two_graph import AdaptationSettings, two_graph_step
from tapfm.aggregators.cls_attention import ClsAttention
from tapfm.encoders.adapters import Scope, apply_scope
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.precision import cast_weights
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import SettingError

SMALL = {"embed_dim": 128, "depth": 4, "num_heads": 2, "img_size": 112}
ENCODERS = {"uni": SMALL, "h-optimus-0": SMALL, "virchow2": SMALL | {"mlp_ratio": 5.5}}

WITHOUT_UPDATE = dataclasses.replace(EAGER, update=0, overhead_bytes=0)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that were created in this context: now, and at the peak."""

    def __init__(self, *before):
        super().__init__()
        self.now = self.peak = 0
        storages = [tensor.untyped_storage() for tensor in before]
        self.known = {storage._cdata: weakref.ref(storage) for storage in storages}

    def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self.add_storage(result.untyped_storage())
        return results

    def add_storage(self, storage):
        address, size = storage._cdata, storage.nbytes()
        if address not in self.known:
            self.known[address] = weakref.ref(storage, lambda _: self.remove_storage(address, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def remove_storage(self, address, size):
        del self.known[address]
        self.now -= size


def small_encoder(key, scope="full", recompute="nothing", dtype=torch.float32):
    torch.manual_seed(0)
    card = find_encoder_card(key)
    encoder = VitEncoder(build_vit(card, extra=ENCODERS[key]), mean=card.mean, std=card.std, feature=card.feature)
    apply_scope(encoder, Scope.parse(scope))
    encoder.recompute = (recompute,) * 4 if isinstance(recompute, str) else recompute
    if dtype != torch.float32:
        cast_weights(encoder, dtype)
    return encoder


def random_tiles(encoder, count):
    return torch.randint(0, 256, (count, 3, encoder.tile_px, encoder.tile_px), dtype=torch.uint8)


def make_inputs(encoder, tiles, precision="float32", **changes):
    inputs = PlannerInput(EncoderShape.from_encoder(encoder), tiles, precision, 1, None, EAGER)
    return dataclasses.replace(inputs, **changes)


def encoder_shape(key, scope="full"):
    """Return the shape of a full-size encoder, built on the meta device."""
    card = find_encoder_card(key)
    with torch.device("meta"):
        encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std, feature=card.feature)
    apply_scope(encoder, Scope.parse(scope))
    return EncoderShape.from_encoder(encoder)


@pytest.fixture(scope="module")
def giant():
    return encoder_shape("h-optimus-0")


@pytest.fixture(scope="module")
def uni():
    return encoder_shape("uni")


def make_plan(shape, gib, tiles=75, **settings_):
    return plan_step(
        shape, tiles=tiles, free_bytes=int(gib * GIB), **({"precision": "bfloat16", "compiled": True} | settings_)
    )


# Counts of parameters


def test_shape_of_a_large_encoder(giant):
    assert giant.parameters == giant.trainable_parameters == find_encoder_card("h-optimus-0").parameters
    assert (giant.depth, giant.width, giant.heads, giant.tokens) == (40, 1536, 24, 261)
    assert (giant.mlp_in, giant.mlp_hidden, giant.gated) == (8192, 4096, True)
    assert giant.tile_flop == pytest.approx(608.3e9, rel=0.01)  # as in the sources of the catalogue


def test_scope_limits_the_trainable_parameters(giant):
    last, lora = encoder_shape("h-optimus-0", "last:4"), encoder_shape("h-optimus-0", "lora:16")
    assert (last.trainable_blocks, last.trainable_embedding) == (4, False)
    assert last.trainable_parameters == 4 * last.block_trainable_parameters + 2 * last.width
    assert (lora.trainable_blocks, lora.has_adapters, lora.trainable_layer_scale) == (40, True, False)
    assert lora.parameters == giant.parameters + lora.trainable_parameters
    assert last.backward_passes == pytest.approx(0.2)  # 4 of 40 blocks; gradients of activations and of weights
    assert lora.backward_passes == pytest.approx(1, abs=0.02)
    assert giant.backward_passes == 2


# Predicted against measured memory


@pytest.mark.parametrize("recompute", RECOMPUTE_LEVELS)
@pytest.mark.parametrize("scope", ["full", "last:2", "lora:4"])
@pytest.mark.parametrize("key", ENCODERS)
def test_size_of_the_graph_is_predicted(key, scope, recompute):
    encoder = small_encoder(key, scope, recompute)
    tiles = random_tiles(encoder, 3)
    graph = compute_graph_cost(make_inputs(encoder, 3), encoder.recompute)
    with LiveBytes(tiles, *encoder.parameters(), *encoder.buffers()) as live:
        encoded = encoder(tiles)
    assert encoded.z_KD.requires_grad
    assert live.now == pytest.approx(3 * graph.graph_bytes, rel=0.04)


@pytest.mark.parametrize("recompute", [*RECOMPUTE_LEVELS, ("block", "mlp", "pointwise", "nothing")])
@pytest.mark.parametrize(("key", "dtype"), [("uni", torch.float32), ("h-optimus-0", torch.bfloat16)])
def test_peak_of_the_backward_pass_is_predicted(key, dtype, recompute):
    encoder = small_encoder(key, recompute=recompute, dtype=dtype)
    tiles = random_tiles(encoder, 6)
    inputs = make_inputs(encoder, 6, str(dtype).removeprefix("torch."))
    with LiveBytes(tiles, *encoder.parameters(), *encoder.buffers()) as live:
        encoded = encoder(tiles)
        torch.autograd.backward(encoded.z_KD.sum() + encoded.r_K.sum())
    predicted = compute_chunk_cost(inputs, compute_graph_cost(inputs, encoder.recompute), 6).peak_bytes(graphs_kept=1)
    assert live.peak == pytest.approx(predicted, rel=0.1)


@pytest.mark.parametrize(
    ("chunk", "graphs_kept", "backward_tiles"), [(12, 1, None), (4, 1, None), (4, 2, None), (4, 3, None), (4, 1, 4)]
)
@pytest.mark.parametrize("recompute", ["nothing", "block"])
def test_peak_of_a_step_is_predicted(chunk, graphs_kept, backward_tiles, recompute):
    encoder = small_encoder("h-optimus-0", recompute=recompute)
    aggregator, tiles = ClsAttention(encoder.feature_size), random_tiles(encoder, 12)
    inputs = make_inputs(encoder, 12, backward_tiles=backward_tiles, coefficients=WITHOUT_UPDATE)
    graph = compute_graph_cost(inputs, encoder.recompute)
    plan = build_plan(inputs, OptimiserStorage(), compute_chunk_cost(inputs, graph, chunk), graphs_kept)
    adaptation = AdaptationSettings(chunking=Chunking(chunk, keep_graphs=graphs_kept), backward_tiles=backward_tiles)
    with LiveBytes(tiles, *encoder.parameters(), *encoder.buffers(), *aggregator.parameters()) as live:
        two_graph_step(encoder, aggregator, TASK, tiles, POSITIVE, adaptation=adaptation)
    predicted = plan.peak_bytes - plan.parts["weights"] - plan.parts["moments"]
    assert live.peak == pytest.approx(predicted, rel=0.1)


def test_parts_of_the_peak_follow_the_optimiser_storage(giant):
    count = giant.trainable_parameters
    in_chunks = make_plan(giant, 80, tiles=4096)
    assert in_chunks.parts["weights"] == 2 * count
    # gradients of several chunks are accumulated in float32
    assert in_chunks.parts["master weights"] == in_chunks.parts["gradients"] == 4 * count
    assert in_chunks.parts["moments"] == 8 * count
    assert in_chunks.float32_gradients
    single = make_plan(giant, 200, precision="float32")
    assert single.parts["weights"] == 4 * count
    assert "master weights" not in single.parts
    offloaded = make_plan(giant, 24, tiles=4096, offload=True)
    assert not {"master weights", "moments"} & set(offloaded.parts)
    assert make_plan(giant, 80, moments="int8").parts["moments"] == pytest.approx(2.03 * count, rel=0.01)


@pytest.mark.parametrize(("precision", "tiles"), [("float32", 300), ("bfloat16", 20), ("bfloat16", 300)])
def test_bfloat16_gradients_of_several_chunks_are_float32(uni, precision, tiles):
    plan = make_plan(uni, 30, tiles=tiles, chunk=20, precision=precision)
    assert plan.float32_gradients == (precision == "bfloat16" and tiles > 20)


# Peak memory that benchmarks/gpu.py measured on an H200 (torch 2.11) with limits of 12 to 80 GiB.
# None of these configurations was used to fit the coefficients.
MEASURED_GIB = [
    ("giant", 75, {"recompute": {"pointwise": 39, "nothing": 1}}, 40.41),
    ("giant", 75, {"recompute": {"mlp": 10, "pointwise": 30}}, 37.42),
    ("giant", 4096, {"recompute": {"pointwise": 39, "nothing": 1}, "chunk": 42, "offload": True}, 20.73),
    ("giant", 4096, {"recompute": {"pointwise": 39, "nothing": 1}, "chunk": 164}, 74.89),
    ("giant", 20_000, {"recompute": {"pointwise": 39, "nothing": 1}, "chunk": 42, "offload": True}, 20.91),
    ("giant", 75, {"recompute": {"block": 24, "mlp": 16}}, 22.38),
    ("giant", 75, {"recompute": {"block": 36, "mlp": 4}, "moments": "bfloat16"}, 14.77),
    ("giant", 75, {"recompute": {"block": 19, "mlp": 21}, "offload": True}, 11.10),
    ("uni", 300, {"recompute": {"pointwise": 23, "nothing": 1}}, 31.15),
    ("uni", 300, {"recompute": {"mlp": 19, "pointwise": 5}}, 22.59),
]


@pytest.mark.parametrize(("shape", "tiles", "strategy", "measured_gib"), MEASURED_GIB)
def test_peak_on_a_gpu_is_predicted(shape, tiles, strategy, measured_gib, request):
    levels = tuple(level for level, count in strategy["recompute"].items() for _ in range(count))
    arguments = strategy | {"recompute": levels, "precision": "bfloat16", "compiled": True}
    plan = predict_step(request.getfixturevalue(shape), tiles=tiles, **arguments)
    assert plan.peak_bytes / GIB == pytest.approx(measured_gib, rel=0.03)


def test_peak_with_adapters_matches_the_measurement_it_was_fitted_to():
    strategy = {"recompute": ("block",) * 38 + ("mlp",) * 2, "precision": "bfloat16", "compiled": True}
    plan = predict_step(encoder_shape("h-optimus-0", "lora:16"), tiles=1024, chunk=52, **strategy)
    assert plan.peak_bytes / GIB == pytest.approx(5.39, rel=0.05)


def test_frozen_parameters_have_no_moments():
    lora = encoder_shape("h-optimus-0", "lora:16")
    plan = make_plan(lora, 24)
    assert plan.parts["weights"] == 2 * lora.parameters
    assert plan.parts["moments"] == 8 * lora.trainable_parameters


# Choice of the plan


def test_one_pass_if_it_fits(giant, uni):
    for shape, tiles in ((giant, 75), (uni, 300)):
        plan = make_plan(shape, 130, tiles=tiles)
        assert (plan.strategy, plan.chunk, plan.graphs_kept, plan.passes) == ("one-pass", tiles, 1, 3)
        assert set(plan.recompute) <= {"nothing", "pointwise"}, "equally fast with compiled blocks"
        assert (plan.moments, plan.offload, plan.float32_gradients) == ("float32", False, False)


def test_first_blocks_recompute_more_with_less_memory(giant):
    plan = make_plan(giant, 40)
    assert plan.strategy == "one-pass"
    levels = [RECOMPUTE_LEVELS.index(level) for level in plan.recompute]
    assert levels == sorted(levels, reverse=True)
    assert set(levels) == {levels[-1], levels[-1] + 1}
    assert 3 < plan.passes < 3.5


def test_large_bag_is_split_into_even_chunks(giant):
    plan = make_plan(giant, 24, tiles=4096)
    assert plan.strategy == "chunked"
    assert plan.passes >= 4 - plan.chunk / 4096
    assert plan.chunk == math.ceil(4096 / plan.chunks)
    assert make_plan(giant, 24, tiles=20_000).peak_bytes <= 24 * GIB


def test_more_graphs_are_kept_with_more_memory(uni):
    plans = [make_plan(uni, gib, tiles=600, recompute="nothing", chunk=100) for gib in (30, 50, 70, 140)]
    assert [plan.graphs_kept for plan in plans] == sorted({plan.graphs_kept for plan in plans})
    assert plans[-1].graphs_kept == plans[-1].chunks == 6
    assert plans[-1].passes == 3
    assert plans[1].strategy == "hybrid"


def test_moments_are_rounded_only_if_float32_does_not_fit(giant):
    assert make_plan(giant, 24).moments == "float32"
    small_bag = make_plan(giant, 15.2)
    assert (small_bag.moments in ("bfloat16", "int8"), small_bag.offload) == (True, False)
    # copying the optimiser's state is slow compared with a step of 75 tiles, but not with one of 4,096
    large_bag = make_plan(giant, 15.2, tiles=4096)
    assert (large_bag.moments, large_bag.offload) == ("float32", True)
    smallest = make_plan(giant, 11)
    assert (smallest.moments, smallest.offload) == ("float32", True)


def test_offloading_is_used_if_it_is_faster(giant):
    on_gpu, offloaded = (make_plan(giant, 23, tiles=20_000, offload=offload) for offload in (False, True))
    assert offloaded.cost < on_gpu.cost  # because larger chunks fit
    assert make_plan(giant, 23, tiles=20_000) == offloaded
    assert not make_plan(giant, 80, tiles=20_000).offload


def test_plan_keeps_given_settings(giant):
    plan = make_plan(giant, 80, tiles=100, chunk=30, recompute="mlp", moments="int8", offload=False)
    assert (plan.chunk, plan.chunks) == (25, 4)  # the same number of chunks as with 30, of even size
    assert plan.recompute == ("mlp",) * 40
    assert (plan.moments, plan.offload) == ("int8", False)
    assert make_plan(giant, 80, tiles=100, chunk="all").strategy == "one-pass"
    assert make_plan(giant, 80, offload=True, moments="bfloat16").offload


def test_gradients_of_several_slides_are_accumulated_in_float32(giant):
    assert not make_plan(giant, 80).float32_gradients
    assert make_plan(giant, 80, slides_per_step=2).float32_gradients


def test_adapters_are_never_planned_with_level_pointwise():
    lora = encoder_shape("uni", "lora:16")
    for gib in (2, 4, 8, 16):
        assert "pointwise" not in make_plan(lora, gib, tiles=300).recompute


def test_frozen_blocks_recompute_nothing():
    last = encoder_shape("h-optimus-0", "last:4")
    plan = make_plan(last, 5)
    assert set(plan.recompute[:-4]) == {"nothing"}
    assert plan.recompute[-4] != "nothing"


def test_backward_through_a_subset_reduces_the_passes(giant):
    plan = make_plan(giant, 80, tiles=1000, backward_tiles=100)
    assert plan.passes == pytest.approx(1 + 3 * 0.1, abs=0.05)
    assert plan.graphs_kept == 0
    assert plan.chunk <= 100
    assert make_plan(giant, 80, backward_tiles=100) == make_plan(giant, 80)  # more than the bag has


def test_error_states_needed_memory_and_settings_to_change(giant):
    with pytest.raises(SettingError, match=r"at least [\d.]+ GiB, but 4\.0 GiB") as caught:
        make_plan(giant, 4)
    assert "lora:16" in caught.value.hint
    assert "auto" not in caught.value.hint  # all settings already are
    with pytest.raises(SettingError) as caught:
        make_plan(giant, 12, recompute="nothing", chunk=64, precision="float32")
    for setting in ("adaptation.recompute to auto", "adaptation.chunk to auto", "bfloat16"):
        assert setting in caught.value.hint
    needed = float(caught.value.message.split("at least ")[1].split()[0])
    assert make_plan(giant, needed + 0.1, recompute="nothing", chunk=64, precision="float32")


@settings(max_examples=20)
@given(
    tiles=st.integers(1, 30_000), gib=st.floats(4, 150), precision=st.sampled_from(["float32", "bfloat16", "float16"])
)
def test_every_plan_fits_and_more_memory_is_never_slower(tiles, gib, precision):
    shape = uni_shape()
    plan = make_plan(shape, gib, tiles=tiles, precision=precision, moments="float32", offload="auto")
    assert plan.peak_bytes <= usable_bytes(int(gib * GIB), EAGER)
    assert plan.peak_bytes == sum(plan.parts.values())
    assert 1 <= plan.chunk <= tiles
    assert 1 <= plan.graphs_kept <= plan.chunks
    assert len(plan.recompute) == shape.depth
    more = make_plan(shape, 2 * gib, tiles=tiles, precision=precision, moments="float32", offload=plan.offload)
    assert more.cost <= plan.cost


@cache
def uni_shape():
    return encoder_shape("uni")


def test_description_of_a_plan(giant):
    lines = describe_plan(make_plan(giant, 24), giant)
    assert lines[0].startswith("One pass: all 75 tiles")
    assert any(line.startswith("Recomputed: block (blocks 1-") for line in lines)
    assert any("float32 moments on the GPU" in line for line in lines)
    assert any(line.startswith("Peak memory: 2") and "weights 2.1" in line for line in lines)
    chunked = describe_plan(make_plan(giant, 24, tiles=4096), giant)
    assert "all but the first chunk are encoded twice" in chunked[0]
    hybrid = describe_plan(make_plan(giant, 80, tiles=150, recompute="nothing", chunk=50), giant)
    assert "1 of 3" not in hybrid[0]
    assert hybrid[0].startswith("Hybrid: 150 tiles in chunks of 50, 2 of 3 graphs kept")

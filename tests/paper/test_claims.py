"""Claims of the paper about the whole method: invariance, separate graphs, time and memory as functions of K."""

import pytest
import torch
from support import cls_attention, random_tiles, relative_difference, small_encoder, step_gradient, take_step
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.two_graph import AdaptationSettings


def test_prediction_and_gradients_are_invariant_to_the_order_of_tiles():
    encoder = small_encoder()
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder, 7)
    shuffled = tiles[torch.randperm(7, generator=torch.Generator().manual_seed(1))]

    logits, shuffled_logits = (take_step(encoder, aggregator, bag).logits_C for bag in (tiles, shuffled))
    torch.testing.assert_close(logits, shuffled_logits, rtol=1e-12, atol=0)
    for chunking in (Chunking(), Chunking(3, keep_graphs=0)):
        ours = step_gradient(encoder, aggregator, shuffled, chunking=chunking)
        assert relative_difference(ours, step_gradient(encoder, aggregator, tiles)) < 1e-9


def test_weights_are_normalised_over_the_bag_and_not_per_chunk():
    encoder = small_encoder()
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder, 7)
    whole = take_step(encoder, aggregator, tiles)
    chunked = take_step(encoder, aggregator, tiles, adaptation=AdaptationSettings(chunking=Chunking(2, keep_graphs=0)))
    torch.testing.assert_close(whole.logits_C, chunked.logits_C, rtol=1e-12, atol=0)


def test_the_two_graphs_are_separate():
    """Graph 1 gives the encoder no gradient, and graph 2 does not change the aggregator's gradient."""
    encoder = small_encoder()
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    gradients = {}

    def update_aggregator():
        gradients["encoder after graph 1"] = [p.grad for p in encoder.parameters()]
        gradients["aggregator after graph 1"] = [p.grad.clone() for p in aggregator.parameters()]

    take_step(encoder, aggregator, tiles, update_aggregator=update_aggregator)
    assert all(gradient is None for gradient in gradients["encoder after graph 1"])
    for parameter, gradient in zip(aggregator.parameters(), gradients["aggregator after graph 1"], strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)


class FlopCounter(TorchDispatchMode):
    """Counts floating point operations. torch's FlopCounterMode does not support autograd.grad."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.total += count(*args, **kwargs, out_val=result)
        return result


def count_flop(tiles: int, chunking: Chunking) -> int:
    encoder = small_encoder(dtype=torch.float32)
    aggregator = cls_attention(encoder)
    with FlopCounter() as counter:
        step_gradient(encoder, aggregator, random_tiles(encoder, tiles), chunking=chunking)
    return counter.total


def activation_bytes(tiles: int, chunking: Chunking) -> int:
    """Return the peak size of all tensors that autograd saves, without parameters."""
    encoder = small_encoder(dtype=torch.float32, depth=4)
    aggregator, bag = cls_attention(encoder), random_tiles(encoder, tiles)
    parameters = {p.untyped_storage().data_ptr() for p in encoder.parameters()}
    saved, peak = {}, 0

    class SavedTensor:
        def __init__(self, tensor):
            nonlocal peak
            self.tensor, self.key = tensor, tensor.untyped_storage().data_ptr()
            if self.key not in parameters:
                count, size = saved.get(self.key, (0, tensor.untyped_storage().nbytes()))
                saved[self.key] = (count + 1, size)
                peak = max(peak, sum(size for _, size in saved.values()))

        def __del__(self):
            count, size = saved.get(self.key, (0, 0))
            if count > 1:
                saved[self.key] = (count - 1, size)
            else:
                saved.pop(self.key, None)

    with torch.autograd.graph.saved_tensors_hooks(SavedTensor, lambda saved_tensor: saved_tensor.tensor):
        step_gradient(encoder, aggregator, bag, chunking=chunking)
    return peak


@pytest.mark.parametrize("chunking", [Chunking(), Chunking(4, keep_graphs=0)], ids=["one pass", "chunked"])
def test_time_is_linear_in_the_number_of_tiles(chunking):
    """Counts operations, which do not depend on the machine."""
    eight, sixteen, thirty_two = (count_flop(k, chunking) for k in (8, 16, 32))
    assert thirty_two - sixteen == 2 * (sixteen - eight) > 0


def test_chunks_without_kept_graph_cost_one_more_forward_pass():
    encoder = small_encoder(dtype=torch.float32)
    with torch.no_grad(), FlopCounter() as forward:
        encoder(random_tiles(encoder, 16))
    one_pass = count_flop(16, Chunking())
    for keep, encoded_again in ((0, 16), (1, 12), (3, 4), (4, 0)):
        assert count_flop(16, Chunking(4, keep_graphs=keep)) - one_pass == forward.total * encoded_again / 16


def test_one_pass_memory_is_linear_in_the_number_of_tiles():
    eight, sixteen, thirty_two = (activation_bytes(k, Chunking()) for k in (8, 16, 32))
    assert thirty_two - sixteen == pytest.approx(2 * (sixteen - eight), rel=0.02)


@pytest.mark.parametrize("keep", [0, 1])
def test_chunked_memory_is_constant_in_the_number_of_tiles(keep):
    chunking = Chunking(4, keep_graphs=keep)
    few, many = activation_bytes(8, chunking), activation_bytes(64, chunking)
    assert many == pytest.approx(few, rel=0.05)
    assert many < activation_bytes(64, Chunking()) / 10


def test_keeping_one_graph_needs_no_more_memory():
    """This is the default, because the second pass has one graph at a time as well."""
    kept, none = (activation_bytes(64, Chunking(4, keep_graphs=keep)) for keep in (1, 0))
    assert kept == pytest.approx(none, rel=0.01)


def test_hybrid_memory_grows_with_the_kept_graphs():
    one, three = (activation_bytes(16, Chunking(4, keep_graphs=keep)) for keep in (1, 3))
    assert three == pytest.approx(3 * one, rel=0.1)

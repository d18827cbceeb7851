"""Chunked and hybrid encoding give the same gradient as one pass."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    cls_attention,
    get_gradient,
    random_tiles,
    relative_difference,
    small_encoder,
    step_gradient,
    take_step,
)

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.errors import SettingError

bags = {
    "tiles": st.integers(1, 12),
    "chunk": st.integers(1, 14),
    "keep": st.integers(0, 4),
    "lambda_": st.floats(0, 2),
    "beta": st.sampled_from([0.0, 0.01, 1.0]),
    "seed": st.integers(0, 5),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["64", "32"])
@given(**bags)
@settings(max_examples=40)
def test_any_chunking_gives_the_one_pass_gradient(dtype, tolerance, tiles, chunk, keep, lambda_, beta, seed):
    encoder = small_encoder(dtype=dtype, seed=seed)
    aggregator, bag = cls_attention(encoder), random_tiles(encoder, tiles, seed)
    losses = {"lambda_": lambda_, "beta": beta}
    one_pass = step_gradient(encoder, aggregator, bag, **losses)
    chunked = step_gradient(encoder, aggregator, bag, chunking=Chunking(chunk, keep), **losses)
    assert relative_difference(chunked, one_pass) < tolerance


@given(tiles=st.integers(3, 12), chunk=st.integers(1, 6), keep=st.integers(0, 2))
@settings(max_examples=20)
def test_any_chunking_gives_the_same_attention_gradient(tiles, chunk, keep):
    """Compare g(lambda = 1) - g(lambda = 0): an error in it could be too small to notice in the whole gradient.

    With 2 tiles, min-max always gives 0 and 1, and the attention has no gradient. So this needs at least 3.
    """
    encoder = small_encoder()
    aggregator, bag = cls_attention(encoder), random_tiles(encoder, tiles)

    def attention_term(chunking):
        with_term = step_gradient(encoder, aggregator, bag, chunking=chunking)
        return with_term - step_gradient(encoder, aggregator, bag, chunking=chunking, lambda_=0.0)

    expected = attention_term(Chunking())
    assert expected.norm() > 0
    assert relative_difference(attention_term(Chunking(chunk, keep)), expected) < 1e-7


@pytest.mark.parametrize("noise", [{"drop_path_rate": 0.5}, {"proj_drop_rate": 0.3}, {"attn_drop_rate": 0.3}], ids=str)
def test_second_pass_uses_the_dropout_masks_of_the_first(noise):
    encoder = small_encoder(depth=3, **noise).train()
    aggregator, bag = cls_attention(encoder), random_tiles(encoder, 11)

    def gradient(keep):
        torch.manual_seed(7)
        return step_gradient(encoder, aggregator, bag, chunking=Chunking(4, keep))

    graphs_kept = gradient(keep=3)
    assert relative_difference(gradient(keep=0), graphs_kept) < 1e-9
    assert relative_difference(gradient(keep=1), graphs_kept) < 1e-9
    torch.manual_seed(8)
    other = step_gradient(encoder, aggregator, bag, chunking=Chunking(4, 3))
    assert relative_difference(other, graphs_kept) > 1e-3, "the masks must matter for this test"


def test_second_pass_does_not_change_the_random_state():
    encoder = small_encoder(drop_path_rate=0.5).train()
    aggregator, bag = cls_attention(encoder), random_tiles(encoder, 8)
    after = []
    for keep in (0, 2):
        torch.manual_seed(7)
        step_gradient(encoder, aggregator, bag, chunking=Chunking(4, keep))
        after.append(torch.rand(3))
    torch.testing.assert_close(*after, rtol=0, atol=0)


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_bfloat16_chunks_agree_with_one_pass(keep):
    encoder = small_encoder(dtype=torch.float32)
    aggregator, bag = cls_attention(encoder), random_tiles(encoder, 12)
    low = {"compute_dtype": torch.bfloat16}
    one_pass = step_gradient(encoder, aggregator, bag, **low)
    chunked = step_gradient(encoder, aggregator, bag, chunking=Chunking(5, keep), **low)
    assert torch.cosine_similarity(chunked, one_pass, dim=0) > 0.999
    exact = step_gradient(encoder, aggregator, bag)
    assert torch.cosine_similarity(chunked, exact, dim=0) > 0.99
    assert all(p.grad.dtype == torch.float32 for p in encoder.parameters() if p.grad is not None)


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, None])
def test_outer_autocast_does_not_change_the_gradient(keep, compute_dtype):
    """Its cache could pass weight copies without a graph from the first pass to the second."""
    encoder = small_encoder(dtype=torch.float32)
    aggregator, bag = cls_attention(encoder), random_tiles(encoder, 8)
    settings_ = {"chunking": Chunking(4, keep_graphs=keep), "compute_dtype": compute_dtype}
    expected = step_gradient(encoder, aggregator, bag, **settings_)
    with torch.autocast("cpu", torch.bfloat16):
        ours = step_gradient(encoder, aggregator, bag, **settings_)
    assert relative_difference(ours, expected) < 1e-6


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_outer_autocast_over_several_steps_uses_updated_weights(keep):
    """Its cache outlives the step and could contain copies of the old weights."""

    def two_steps(outer):
        encoder = small_encoder(dtype=torch.float32)
        aggregator, bag = cls_attention(encoder), random_tiles(encoder, 8)
        optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
        adaptation = AdaptationSettings(chunking=Chunking(4, keep), compute_dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16) if outer else contextlib.nullcontext():
            for update in (optimizer.step, lambda: None):
                optimizer.zero_grad()
                take_step(encoder, aggregator, bag, adaptation=adaptation, update_encoder=update)
        return get_gradient(encoder)

    assert relative_difference(two_steps(outer=True), two_steps(outer=False)) < 1e-6


@given(count=st.integers(1, 300), tiles=st.integers(1, 80))
def test_bag_is_split_into_the_fewest_even_chunks(count, tiles):
    chunks = Chunking(tiles).split_bag(count)
    assert [row for chunk in chunks for row in range(count)[chunk]] == list(range(count))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert len(sizes) == -(-count // tiles)
    assert max(sizes) <= tiles
    assert max(sizes) - min(sizes) <= 1


def test_halving_ends_at_one_tile():
    assert Chunking().halve(75) == Chunking(38, keep_graphs=1)
    assert Chunking(64, keep_graphs=3).halve(75) == Chunking(19, keep_graphs=1), "75 tiles make chunks of 38 and 37"
    assert Chunking(2, keep_graphs=0).halve(9) == Chunking(1, keep_graphs=0)
    assert Chunking(1).halve(9) is None


def test_frozen_encoder_gets_no_gradient():
    encoder = small_encoder().requires_grad_(False)
    aggregator = cls_attention(encoder)
    adaptation = AdaptationSettings(chunking=Chunking(2))
    report = take_step(encoder, aggregator, random_tiles(encoder), adaptation=adaptation)
    assert report.norm_encoder == 0
    assert get_gradient(aggregator).norm() > 0


def test_only_trainable_parameters_get_a_gradient():
    encoder = small_encoder()
    encoder.vit.blocks[0].requires_grad_(False)
    aggregator, bag = cls_attention(encoder), random_tiles(encoder, 6)
    one_pass = step_gradient(encoder, aggregator, bag)
    assert relative_difference(step_gradient(encoder, aggregator, bag, chunking=Chunking(4, 0)), one_pass) < 1e-9
    assert all(p.grad is None for p in encoder.vit.blocks[0].parameters())


@pytest.mark.parametrize(
    "settings_", [{"tiles": 0}, {"tiles": -3}, {"tiles": 2.5}, {"keep_graphs": -1}, {"keep_graphs": "all"}], ids=str
)
def test_invalid_chunking_is_an_error(settings_):
    with pytest.raises(SettingError):
        Chunking(**settings_)

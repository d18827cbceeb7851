"""Chunked and hybrid encoding give the one-pass gradient, whatever the pieces."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cls_attention, gradient_of, relative_difference, small_encoder, some_tiles, step_gradient, take_step

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
def test_any_pieces_give_the_one_pass_gradient(dtype, tolerance, tiles, chunk, keep, lambda_, beta, seed):
    encoder = small_encoder(dtype=dtype, seed=seed)
    aggregator, bag = cls_attention(encoder), some_tiles(encoder, tiles, seed)
    losses = {"lambda_": lambda_, "beta": beta}
    one_pass = step_gradient(encoder, aggregator, bag, **losses)
    pieces = step_gradient(encoder, aggregator, bag, chunking=Chunking(chunk, keep), **losses)
    assert relative_difference(pieces, one_pass) < tolerance


@given(tiles=st.integers(3, 12), chunk=st.integers(1, 6), keep=st.integers(0, 2))
@settings(max_examples=20)
def test_the_attention_term_survives_any_pieces(tiles, chunk, keep):
    """g(lambda = 1) - g(lambda = 0) by itself: in the whole gradient its loss could go unseen.

    From 3 tiles on: min-max makes of 2 always 0 and 1, so that their attention has no gradient.
    """
    encoder = small_encoder()
    aggregator, bag = cls_attention(encoder), some_tiles(encoder, tiles)

    def attention_term(chunking):
        with_term = step_gradient(encoder, aggregator, bag, chunking=chunking)
        return with_term - step_gradient(encoder, aggregator, bag, chunking=chunking, lambda_=0.0)

    expected = attention_term(Chunking())
    assert expected.norm() > 0
    assert relative_difference(attention_term(Chunking(chunk, keep)), expected) < 1e-7


@pytest.mark.parametrize("noise", [{"drop_path_rate": 0.5}, {"proj_drop_rate": 0.3}, {"attn_drop_rate": 0.3}], ids=str)
def test_the_second_pass_replays_the_masks_of_the_first(noise):
    encoder = small_encoder(depth=3, **noise).train()
    aggregator, bag = cls_attention(encoder), some_tiles(encoder, 11)

    def gradient(keep):
        torch.manual_seed(7)
        return step_gradient(encoder, aggregator, bag, chunking=Chunking(4, keep))

    graphs_kept = gradient(keep=3)
    assert relative_difference(gradient(keep=0), graphs_kept) < 1e-9
    assert relative_difference(gradient(keep=1), graphs_kept) < 1e-9
    torch.manual_seed(8)
    other = step_gradient(encoder, aggregator, bag, chunking=Chunking(4, 3))
    assert relative_difference(other, graphs_kept) > 1e-3, "without masks the test would show nothing"


def test_replaying_leaves_the_generator_as_one_pass_would():
    encoder = small_encoder(drop_path_rate=0.5).train()
    aggregator, bag = cls_attention(encoder), some_tiles(encoder, 8)
    after = []
    for keep in (0, 2):
        torch.manual_seed(7)
        step_gradient(encoder, aggregator, bag, chunking=Chunking(4, keep))
        after.append(torch.rand(3))
    torch.testing.assert_close(*after, rtol=0, atol=0)


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_bfloat16_pieces_agree_with_one_pass(keep):
    encoder = small_encoder(dtype=torch.float32)
    aggregator, bag = cls_attention(encoder), some_tiles(encoder, 12)
    low = {"compute_dtype": torch.bfloat16}
    one_pass = step_gradient(encoder, aggregator, bag, **low)
    pieces = step_gradient(encoder, aggregator, bag, chunking=Chunking(5, keep), **low)
    assert torch.cosine_similarity(pieces, one_pass, dim=0) > 0.999
    exact = step_gradient(encoder, aggregator, bag)
    assert torch.cosine_similarity(pieces, exact, dim=0) > 0.99
    assert all(p.grad.dtype == torch.float32 for p in encoder.parameters() if p.grad is not None)


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, None])
def test_an_outer_autocast_changes_nothing(keep, compute_dtype):
    """Its cache would hand the first pass's weight copies, which have no graph, to the second pass."""
    encoder = small_encoder(dtype=torch.float32)
    aggregator, bag = cls_attention(encoder), some_tiles(encoder, 8)
    settings_ = {"chunking": Chunking(4, keep_graphs=keep), "compute_dtype": compute_dtype}
    expected = step_gradient(encoder, aggregator, bag, **settings_)
    with torch.autocast("cpu", torch.bfloat16):
        ours = step_gradient(encoder, aggregator, bag, **settings_)
    assert relative_difference(ours, expected) < 1e-6


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_an_outer_autocast_over_several_steps_does_not_use_weights_from_before_the_update(keep):
    """Its cache outlives the step, and the copies in it are those of the old weights."""

    def two_steps(outer):
        encoder = small_encoder(dtype=torch.float32)
        aggregator, bag = cls_attention(encoder), some_tiles(encoder, 8)
        optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
        adaptation = AdaptationSettings(chunking=Chunking(4, keep), compute_dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16) if outer else contextlib.nullcontext():
            for update in (optimizer.step, lambda: None):
                optimizer.zero_grad()
                take_step(encoder, aggregator, bag, adaptation=adaptation, update_encoder=update)
        return gradient_of(encoder)

    assert relative_difference(two_steps(outer=True), two_steps(outer=False)) < 1e-6


@given(count=st.integers(1, 300), tiles=st.integers(1, 80))
def test_a_bag_is_cut_into_the_fewest_chunks_of_nearly_the_same_size(count, tiles):
    chunks = Chunking(tiles).split_bag(count)
    assert [row for chunk in chunks for row in range(count)[chunk]] == list(range(count))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert len(sizes) == -(-count // tiles)
    assert max(sizes) <= tiles
    assert max(sizes) - min(sizes) <= 1


def test_a_chunk_is_halved_until_it_is_one_tile():
    assert Chunking().halve(75) == Chunking(38, keep_graphs=1)
    assert Chunking(64, keep_graphs=3).halve(75) == Chunking(19, keep_graphs=1), "75 tiles are chunks of 38 and 37"
    assert Chunking(2, keep_graphs=0).halve(9) == Chunking(1, keep_graphs=0)
    assert Chunking(1).halve(9) is None


def test_a_fixed_encoder_is_left_alone():
    encoder = small_encoder().requires_grad_(False)
    aggregator = cls_attention(encoder)
    adaptation = AdaptationSettings(chunking=Chunking(2))
    report = take_step(encoder, aggregator, some_tiles(encoder), adaptation=adaptation)
    assert report.norm_encoder == 0
    assert gradient_of(aggregator).norm() > 0


def test_only_the_parameters_that_train_get_a_gradient():
    encoder = small_encoder()
    encoder.vit.blocks[0].requires_grad_(False)
    aggregator, bag = cls_attention(encoder), some_tiles(encoder, 6)
    one_pass = step_gradient(encoder, aggregator, bag)
    assert relative_difference(step_gradient(encoder, aggregator, bag, chunking=Chunking(4, 0)), one_pass) < 1e-9
    assert all(p.grad is None for p in encoder.vit.blocks[0].parameters())


@pytest.mark.parametrize(
    "settings_", [{"tiles": 0}, {"tiles": -3}, {"tiles": 2.5}, {"keep_graphs": -1}, {"keep_graphs": "all"}], ids=str
)
def test_bad_chunking_is_refused(settings_):
    with pytest.raises(SettingError):
        Chunking(**settings_)

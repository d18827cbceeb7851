"""Backward through a subset: the mean over draws is the whole gradient, and a step takes a draw's own gradient."""

import itertools

import numpy as np
import pytest
import torch
from support import (
    POSITIVE,
    TASK,
    cls_attention,
    gradient_of,
    relative_difference,
    small_encoder,
    some_tiles,
    step_gradient,
    take_step,
)

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.subset import inclusion_probabilities, sample_subset, systematic_sample, tile_importance
from tapfm.adaptation.two_graph import AdaptationSettings, compute_aggregator_gradients
from tapfm.adaptation.two_graph import _cosine_loss as cosine_loss

TILES, COUNT = 24, 7


@pytest.fixture(scope="module", params=[0.0, 0.3], ids=["beta 0", "beta 0.3"])
def case(request):
    """An encoder, its bag, the gradients at the tiles and what each tile adds to the encoder's gradient."""
    encoder = small_encoder()
    aggregator = cls_attention(encoder, tau=0.2)
    tiles = some_tiles(encoder, TILES)
    with torch.no_grad():
        encoded = encoder(tiles)
    leaves = [values.clone().requires_grad_() for values in encoded]
    graph = compute_aggregator_gradients(aggregator, TASK, *leaves, POSITIVE)
    of_tile = []
    for i in range(TILES):
        encoder.zero_grad()
        z, r = encoder(tiles[i : i + 1])
        loss = (z * graph.g_z_KD[i]).sum() + 0.5 * (r * graph.g_r_K[i]).sum()
        loss = loss + request.param * cosine_loss(z, graph.g_z_KD[i : i + 1], "paper").sum()
        torch.autograd.backward(loss)
        of_tile.append(gradient_of(encoder).clone())
    settings = {"lambda_": 0.5, "beta": request.param}
    return encoder, aggregator, tiles, encoded, graph, torch.stack(of_tile), settings


def test_the_mean_over_all_draws_is_the_whole_gradient(case):
    encoder, aggregator, tiles, encoded, graph, of_tile, settings = case
    whole = step_gradient(encoder, aggregator, tiles, **settings)
    assert relative_difference(of_tile.sum(0), whole) < 1e-9
    chances = inclusion_probabilities(tile_importance(encoded, graph.g_z_KD, graph.g_r_K, 0.5).numpy(), COUNT)
    order = np.random.default_rng(0).permutation(TILES)
    # between two breakpoints of `start` the same tiles are drawn: the mean over all of them is a sum
    cuts = np.unique(np.concatenate([[0.0, 1.0], np.cumsum(chances[order][chances[order] < 1]) % 1.0]))
    mean = torch.zeros_like(whole)
    for low, high in itertools.pairwise(cuts):
        rows = systematic_sample(chances, order, (low + high) / 2)
        mean += (high - low) * (torch.from_numpy(1 / chances[rows]) @ of_tile[rows])
    assert relative_difference(mean, whole) < 1e-9


def test_the_mean_over_many_draws_comes_near_it(case):
    *_, encoded, graph, of_tile, _ = case
    generator, whole = torch.Generator().manual_seed(0), of_tile.sum(0)
    drawn = [sample_subset(encoded, graph.g_z_KD, graph.g_r_K, 0.5, COUNT, generator) for _ in range(500)]
    found = torch.stack([subset.weights @ of_tile[subset.rows] for subset in drawn])
    error_of_mean = (found - whole).norm(dim=1).square().mean().sqrt() / 500**0.5
    assert (found.mean(0) - whole).norm() < 3 * error_of_mean
    assert error_of_mean < 0.1 * whole.norm()


@pytest.mark.parametrize("chunking", [Chunking(), Chunking(3), Chunking(3, keep_graphs=2)])
def test_a_step_takes_the_gradient_of_the_draw(case, chunking):
    encoder, aggregator, tiles, encoded, graph, of_tile, settings = case
    torch.manual_seed(5)
    subset = sample_subset(encoded, graph.g_z_KD, graph.g_r_K, 0.5, COUNT)
    torch.manual_seed(5)
    found = step_gradient(encoder, aggregator, tiles, backward_tiles=COUNT, chunking=chunking, **settings)
    assert relative_difference(found, subset.weights @ of_tile[subset.rows]) < 1e-9


def test_a_step_through_as_many_as_there_are_takes_the_whole_gradient(case):
    encoder, aggregator, tiles, *_, of_tile, settings = case
    found = step_gradient(encoder, aggregator, tiles, backward_tiles=TILES, **settings)
    assert relative_difference(found, of_tile.sum(0)) < 1e-9


def test_a_bag_of_no_more_tiles_than_are_drawn_is_encoded_once():
    encoder = small_encoder()
    for tiles, graphs in ((COUNT, 1), (COUNT + 1, 0)):
        adaptation = AdaptationSettings(backward_tiles=COUNT)
        report = take_step(encoder, cls_attention(encoder), some_tiles(encoder, tiles), adaptation=adaptation)
        assert report.graphs_kept == graphs

"""Backward pass through a sampled subset of the tiles: an unbiased estimate of the whole gradient."""

import itertools

import numpy as np
import pytest
import torch
from support import (
    POSITIVE,
    TASK,
    cls_attention,
    get_gradient,
    random_tiles,
    relative_difference,
    small_encoder,
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
    """Encoder, bag, gradients at the tiles, and the contribution of each tile to the encoder's gradient."""
    encoder = small_encoder()
    aggregator = cls_attention(encoder, tau=0.2)
    tiles = random_tiles(encoder, TILES)
    with torch.no_grad():
        encoded = encoder(tiles)
    leaves = [values.clone().requires_grad_() for values in encoded]
    graph = compute_aggregator_gradients(aggregator, TASK, *leaves, POSITIVE)
    tile_gradients = []
    for i in range(TILES):
        encoder.zero_grad()
        z, r = encoder(tiles[i : i + 1])
        loss = (z * graph.g_z_KD[i]).sum() + 0.5 * (r * graph.g_r_K[i]).sum()
        loss = loss + request.param * cosine_loss(z, graph.g_z_KD[i : i + 1], "paper").sum()
        torch.autograd.backward(loss)
        tile_gradients.append(get_gradient(encoder).clone())
    settings = {"lambda_": 0.5, "beta": request.param}
    return encoder, aggregator, tiles, encoded, graph, torch.stack(tile_gradients), settings


def test_expected_gradient_is_the_whole_gradient(case):
    encoder, aggregator, tiles, encoded, graph, tile_gradients, settings = case
    whole = step_gradient(encoder, aggregator, tiles, **settings)
    assert relative_difference(tile_gradients.sum(0), whole) < 1e-9
    probabilities = inclusion_probabilities(tile_importance(encoded, graph.g_z_KD, graph.g_r_K, 0.5).numpy(), COUNT)
    order = np.random.default_rng(0).permutation(TILES)
    # between two breakpoints of `start`, the sample is constant, so the expectation is a finite sum
    cuts = np.unique(np.concatenate([[0.0, 1.0], np.cumsum(probabilities[order][probabilities[order] < 1]) % 1.0]))
    mean = torch.zeros_like(whole)
    for low, high in itertools.pairwise(cuts):
        rows = systematic_sample(probabilities, order, (low + high) / 2)
        mean += (high - low) * (torch.from_numpy(1 / probabilities[rows]) @ tile_gradients[rows])
    assert relative_difference(mean, whole) < 1e-9


def test_mean_over_many_samples_approaches_the_whole_gradient(case):
    *_, encoded, graph, tile_gradients, _ = case
    generator, whole = torch.Generator().manual_seed(0), tile_gradients.sum(0)
    subsets = [sample_subset(encoded, graph.g_z_KD, graph.g_r_K, 0.5, COUNT, generator) for _ in range(500)]
    estimates = torch.stack([subset.weights @ tile_gradients[subset.rows] for subset in subsets])
    error_of_mean = (estimates - whole).norm(dim=1).square().mean().sqrt() / 500**0.5
    assert (estimates.mean(0) - whole).norm() < 3 * error_of_mean
    assert error_of_mean < 0.1 * whole.norm()


@pytest.mark.parametrize("chunking", [Chunking(), Chunking(3), Chunking(3, keep_graphs=2)])
def test_step_computes_the_gradient_of_the_sample(case, chunking):
    encoder, aggregator, tiles, encoded, graph, tile_gradients, settings = case
    torch.manual_seed(5)
    subset = sample_subset(encoded, graph.g_z_KD, graph.g_r_K, 0.5, COUNT)
    torch.manual_seed(5)
    gradient = step_gradient(encoder, aggregator, tiles, backward_tiles=COUNT, chunking=chunking, **settings)
    assert relative_difference(gradient, subset.weights @ tile_gradients[subset.rows]) < 1e-9


def test_backward_tiles_equal_to_the_bag_size_gives_the_whole_gradient(case):
    encoder, aggregator, tiles, *_, tile_gradients, settings = case
    gradient = step_gradient(encoder, aggregator, tiles, backward_tiles=TILES, **settings)
    assert relative_difference(gradient, tile_gradients.sum(0)) < 1e-9


def test_small_bag_is_encoded_only_once():
    encoder = small_encoder()
    for tiles, graphs in ((COUNT, 1), (COUNT + 1, 0)):
        adaptation = AdaptationSettings(backward_tiles=COUNT)
        report = take_step(encoder, cls_attention(encoder), random_tiles(encoder, tiles), adaptation=adaptation)
        assert report.graphs_kept == graphs

"""The draw of a subset: exact chances, a fixed number, an estimate that is right on average and varies little."""

import itertools

import numpy as np
import pytest
import torch

from tapfm.adaptation.subset import inclusion_probabilities, sample_subset, systematic_sample
from tapfm.contracts import EncodedTiles
from tapfm.errors import SettingError


def skewed(tiles, seed=0):
    """Sizes over several orders of magnitude, as after a sharp softmax."""
    return np.exp(2 * np.random.default_rng(seed).normal(size=tiles))


def gradients(tiles, width=6, seed=0, dtype=torch.float32):
    """What the tiles are, and the gradients at them."""
    rng = np.random.default_rng(seed)
    z, r = rng.normal(3, 2, (tiles, width)), rng.normal(1, 0.01, tiles)
    g_z = rng.normal(size=(tiles, width)) * skewed(tiles, seed)[:, None]
    g_r = rng.normal(size=tiles) * skewed(tiles, seed + 1)
    z, r, g_z, g_r = (torch.from_numpy(values).to(dtype) for values in (z, r, g_z, g_r))
    return EncodedTiles(z, r), g_z, g_r


def spread_of_one(tiles, width=3):
    """Tiles whose features and attentions have the deviation 1."""
    values = torch.linspace(-1, 1, tiles, dtype=torch.float64)
    values /= values.std()
    return EncodedTiles(values[:, None].repeat(1, width), values)


def mean_weights(chances, order):
    """The expected weight of each tile, exactly: between two breakpoints of `start` the same tiles are taken."""
    ends = np.cumsum(chances[order][chances[order] < 1])
    cuts = np.unique(np.concatenate([[0.0, 1.0], ends % 1.0]))
    expected = np.zeros(len(chances))
    for low, high in itertools.pairwise(cuts):
        rows = systematic_sample(chances, order, (low + high) / 2)
        expected[rows] += (high - low) / chances[rows]
    return expected


@pytest.mark.parametrize("count", [1, 5, 20, 39])
@pytest.mark.parametrize("seed", range(5))
def test_every_tile_is_taken_with_exactly_its_chance(count, seed):
    chances = inclusion_probabilities(skewed(40, seed), count)
    order = np.random.default_rng(seed).permutation(40)
    np.testing.assert_allclose(mean_weights(chances, order), 1, atol=1e-9)


@pytest.mark.parametrize("count", [1, 7, 30, 59])
def test_chances_are_proportional_capped_and_add_up(count):
    sizes = skewed(60)
    chances = inclusion_probabilities(sizes, count)
    assert chances.sum() == pytest.approx(count, rel=1e-12)
    assert (chances > 0).all()
    assert (chances <= 1).all()
    free = chances < 1
    ratio = chances[free] / sizes[free]
    assert ratio.max() / ratio.min() == pytest.approx(1, rel=1e-9)
    # those that are certain would otherwise be above 1
    assert (sizes[~free] * ratio[0] >= 1 - 1e-9).all()
    assert count < 30 or (~free).any()


def test_tiles_are_drawn_as_often_as_their_chance_says():
    bag = gradients(30)
    generator = torch.Generator().manual_seed(0)
    draws, seen, weight = 4000, np.zeros(30), np.zeros(30)
    for _ in range(draws):
        subset = sample_subset(*bag, 1.0, 8, generator)
        assert len(subset.rows) == len(subset.weights) == 8
        assert subset.rows.tolist() == sorted(set(subset.rows.tolist()))
        seen[subset.rows] += 1
        weight[subset.rows] = subset.weights  # the same in each draw
    chances = 1 / weight
    deviation = np.sqrt(chances * (1 - chances) / draws)
    assert (np.abs(seen / draws - chances) <= 5 * deviation + 1e-6).all()
    assert chances.sum() == pytest.approx(8, rel=1e-5)


def test_the_mean_over_draws_is_the_whole_sum_and_varies_less_than_with_even_chances():
    encoded, g_z, g_r = gradients(200, dtype=torch.float64)
    terms = torch.cat([2 * g_z, 0.01 * g_r[:, None]], dim=1)  # as features and attentions vary
    whole, generator, draws = terms.sum(0), torch.Generator().manual_seed(1), 2000

    def estimates(g_z, g_r):
        drawn = (sample_subset(encoded, g_z, g_r, 1.0, 20, generator) for _ in range(draws))
        return torch.stack([subset.weights @ terms[subset.rows] for subset in drawn])

    by_size, evenly = estimates(g_z, g_r), estimates(torch.zeros_like(g_z), torch.zeros_like(g_r))
    for found in (by_size, evenly):
        error_of_mean = found.std(0) / draws**0.5
        assert ((found.mean(0) - whole).abs() <= 5 * error_of_mean).all()
    assert (by_size - whole).square().sum(1).mean() < 0.2 * (evenly - whole).square().sum(1).mean()


@pytest.mark.parametrize("tiles", [1, 4, 5])
def test_a_bag_that_is_not_larger_is_taken_whole(tiles):
    subset = sample_subset(*gradients(tiles), 1.0, 5)
    assert subset.rows.tolist() == list(range(tiles))
    assert subset.weights.tolist() == [1.0] * tiles


@pytest.mark.parametrize("alike", [False, True])
def test_a_tile_with_any_gradient_has_a_chance(alike):
    encoded, g_z, g_r = spread_of_one(50), torch.zeros(50, 3), torch.zeros(50)
    if alike:  # tiles that do not differ at all
        encoded = EncodedTiles(torch.ones(50, 3), torch.ones(50))
    g_z[7], g_r[20] = 1e-30, -1e3  # the square of the one is 0 in float32
    subset = sample_subset(encoded, g_z, g_r, 1.0, 2)
    assert subset.rows.tolist() == [7, 20]
    assert subset.weights.tolist() == [1.0, 1.0]
    assert sample_subset(encoded, g_z, g_r, 0.0, 2).rows.tolist() == [7], (
        "no attention loss: its gradient does not count"
    )


def test_the_attention_counts_by_its_loss_and_by_how_much_it_varies():
    encoded, g_z, g_r = spread_of_one(100), torch.zeros(100, 3), torch.zeros(100)
    g_z[:, 0] = 1.0
    g_r[:50] = 1.0

    def rarest(lambda_, times=1.0):
        generator = torch.Generator().manual_seed(0)
        drawn = sample_subset(EncodedTiles(encoded.z_KD, times * encoded.r_K), g_z, g_r, lambda_, 10, generator)
        return float(drawn.weights.max())

    # the other half, of size 1 each, has 100 / (100 + 50 lambda) of the even chance
    np.testing.assert_allclose([rarest(0.0), rarest(0.5), rarest(1.0), rarest(1.0, 3.0)], [10, 12.5, 15, 25], rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_gradients_that_say_nothing_give_even_chances(value):
    subset = sample_subset(spread_of_one(40), torch.full((40, 3), value), torch.full((40,), value), 1.0, 10)
    assert len(subset.rows) == 10
    assert subset.weights.tolist() == [4.0] * 10


def test_large_bags_and_small_gradients_are_no_trouble_in_float32():
    encoded, g_z, g_r = gradients(20_000, width=8)
    subset = sample_subset(encoded, 1e-15 * g_z, 1e-15 * g_r, 1.0, 2048)
    assert len(subset.rows) == 2048
    assert subset.weights.isfinite().all()
    assert subset.weights.min() >= 1
    # of what the chances follow, the sum over all tiles is found exactly, whatever is drawn
    sizes = encoded.z_KD.var(0).mean().sqrt() * g_z.norm(dim=1) + encoded.r_K.std() * g_r.abs()
    assert float(subset.weights @ sizes[subset.rows]) == pytest.approx(float(sizes.sum()), rel=1e-4)


def test_the_generator_decides():
    bag = gradients(100)
    first, again, other = (
        sample_subset(*bag, 1.0, 10, torch.Generator().manual_seed(seed)).rows.tolist() for seed in (3, 3, 4)
    )
    assert first == again != other
    torch.manual_seed(3)
    assert sample_subset(*bag, 1.0, 10).rows.tolist() == first, "None: torch's own"


def test_no_tiles_are_no_subset():
    with pytest.raises(SettingError, match="at least 1 tile"):
        sample_subset(*gradients(5), 1.0, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_draws_the_same_tiles():
    encoded, g_z, g_r = gradients(1000)
    here = sample_subset(encoded, g_z, g_r, 1.0, 100, torch.Generator().manual_seed(0))
    on_gpu = EncodedTiles(*(values.cuda() for values in encoded))
    there = sample_subset(on_gpu, g_z.cuda(), g_r.cuda(), 1.0, 100, torch.Generator().manual_seed(0))
    assert there.weights.device.type == "cuda"
    assert there.rows.device.type == "cpu"
    assert len(np.intersect1d(here.rows, there.rows)) >= 98  # a rounding may move a tile across an edge
    torch.testing.assert_close(there.weights.cpu().sum(), here.weights.sum(), rtol=0.1, atol=0)

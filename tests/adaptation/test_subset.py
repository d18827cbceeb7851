"""Sampling of a subset: exact probabilities, a fixed size, an unbiased estimate with low variance."""

import itertools

import numpy as np
import pytest
import torch

from tapfm.adaptation.subset import inclusion_probabilities, sample_subset, systematic_sample
from tapfm.contracts import EncodedTiles
from tapfm.errors import SettingError


def skewed(tiles, seed=0):
    """Return values over several orders of magnitude, as after a sharp softmax."""
    return np.exp(2 * np.random.default_rng(seed).normal(size=tiles))


def random_bag(tiles, width=6, seed=0, dtype=torch.float32):
    """Return random features and attentions of tiles, and gradients at them."""
    rng = np.random.default_rng(seed)
    z, r = rng.normal(3, 2, (tiles, width)), rng.normal(1, 0.01, tiles)
    g_z = rng.normal(size=(tiles, width)) * skewed(tiles, seed)[:, None]
    g_r = rng.normal(size=tiles) * skewed(tiles, seed + 1)
    z, r, g_z, g_r = (torch.from_numpy(values).to(dtype) for values in (z, r, g_z, g_r))
    return EncodedTiles(z, r), g_z, g_r


def standardised_tiles(tiles, width=3):
    """Return tiles whose features and attentions have standard deviation 1."""
    values = torch.linspace(-1, 1, tiles, dtype=torch.float64)
    values /= values.std()
    return EncodedTiles(values[:, None].repeat(1, width), values)


def mean_weights(probabilities, order):
    """Return the exact expected weight of each tile. Between two breakpoints of `start`, the sample is constant."""
    ends = np.cumsum(probabilities[order][probabilities[order] < 1])
    cuts = np.unique(np.concatenate([[0.0, 1.0], ends % 1.0]))
    expected = np.zeros(len(probabilities))
    for low, high in itertools.pairwise(cuts):
        rows = systematic_sample(probabilities, order, (low + high) / 2)
        expected[rows] += (high - low) / probabilities[rows]
    return expected


@pytest.mark.parametrize("count", [1, 5, 20, 39])
@pytest.mark.parametrize("seed", range(5))
def test_tiles_are_sampled_with_exactly_their_probability(count, seed):
    probabilities = inclusion_probabilities(skewed(40, seed), count)
    order = np.random.default_rng(seed).permutation(40)
    np.testing.assert_allclose(mean_weights(probabilities, order), 1, atol=1e-9)


@pytest.mark.parametrize("count", [1, 7, 30, 59])
def test_probabilities_are_proportional_limited_and_sum_to_count(count):
    sizes = skewed(60)
    probabilities = inclusion_probabilities(sizes, count)
    assert probabilities.sum() == pytest.approx(count, rel=1e-12)
    assert (probabilities > 0).all()
    assert (probabilities <= 1).all()
    free = probabilities < 1
    ratio = probabilities[free] / sizes[free]
    assert ratio.max() / ratio.min() == pytest.approx(1, rel=1e-9)
    # without the limit, these would be above 1
    assert (sizes[~free] * ratio[0] >= 1 - 1e-9).all()
    assert count < 30 or (~free).any()


def test_sampling_frequencies_match_the_probabilities():
    bag = random_bag(30)
    generator = torch.Generator().manual_seed(0)
    samples, counts, weight = 4000, np.zeros(30), np.zeros(30)
    for _ in range(samples):
        subset = sample_subset(*bag, 1.0, 8, generator)
        assert len(subset.rows) == len(subset.weights) == 8
        assert subset.rows.tolist() == sorted(set(subset.rows.tolist()))
        counts[subset.rows] += 1
        weight[subset.rows] = subset.weights  # the same in each sample
    probabilities = 1 / weight
    deviation = np.sqrt(probabilities * (1 - probabilities) / samples)
    assert (np.abs(counts / samples - probabilities) <= 5 * deviation + 1e-6).all()
    assert probabilities.sum() == pytest.approx(8, rel=1e-5)


def test_estimate_is_unbiased_with_less_variance_than_uniform_sampling():
    encoded, g_z, g_r = random_bag(200, dtype=torch.float64)
    terms = torch.cat([2 * g_z, 0.01 * g_r[:, None]], dim=1)  # as features and attentions vary
    whole, generator, samples = terms.sum(0), torch.Generator().manual_seed(1), 2000

    def estimates(g_z, g_r):
        subsets = (sample_subset(encoded, g_z, g_r, 1.0, 20, generator) for _ in range(samples))
        return torch.stack([subset.weights @ terms[subset.rows] for subset in subsets])

    by_importance, uniform = estimates(g_z, g_r), estimates(torch.zeros_like(g_z), torch.zeros_like(g_r))
    for estimate in (by_importance, uniform):
        error_of_mean = estimate.std(0) / samples**0.5
        assert ((estimate.mean(0) - whole).abs() <= 5 * error_of_mean).all()
    assert (by_importance - whole).square().sum(1).mean() < 0.2 * (uniform - whole).square().sum(1).mean()


@pytest.mark.parametrize("tiles", [1, 4, 5])
def test_small_bag_is_used_completely(tiles):
    subset = sample_subset(*random_bag(tiles), 1.0, 5)
    assert subset.rows.tolist() == list(range(tiles))
    assert subset.weights.tolist() == [1.0] * tiles


@pytest.mark.parametrize("equal_tiles", [False, True])
def test_tile_with_any_gradient_can_be_sampled(equal_tiles):
    encoded, g_z, g_r = standardised_tiles(50), torch.zeros(50, 3), torch.zeros(50)
    if equal_tiles:
        encoded = EncodedTiles(torch.ones(50, 3), torch.ones(50))
    g_z[7], g_r[20] = 1e-30, -1e3  # 1e-30 squared underflows to 0 in float32
    subset = sample_subset(encoded, g_z, g_r, 1.0, 2)
    assert subset.rows.tolist() == [7, 20]
    assert subset.weights.tolist() == [1.0, 1.0]
    assert sample_subset(encoded, g_z, g_r, 0.0, 2).rows.tolist() == [7], (
        "with lambda = 0, the gradient at the attention does not count"
    )


def test_importance_of_attention_scales_with_lambda_and_its_deviation():
    encoded, g_z, g_r = standardised_tiles(100), torch.zeros(100, 3), torch.zeros(100)
    g_z[:, 0] = 1.0
    g_r[:50] = 1.0

    def largest_weight(lambda_, scale=1.0):
        generator = torch.Generator().manual_seed(0)
        subset = sample_subset(EncodedTiles(encoded.z_KD, scale * encoded.r_K), g_z, g_r, lambda_, 10, generator)
        return float(subset.weights.max())

    # tiles of the second half have 100 / (100 + 50 lambda) times the uniform probability
    np.testing.assert_allclose(
        [largest_weight(0.0), largest_weight(0.5), largest_weight(1.0), largest_weight(1.0, 3.0)],
        [10, 12.5, 15, 25],
        rtol=1e-6,
    )


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_zero_or_non_finite_gradients_give_uniform_probabilities(value):
    subset = sample_subset(standardised_tiles(40), torch.full((40, 3), value), torch.full((40,), value), 1.0, 10)
    assert len(subset.rows) == 10
    assert subset.weights.tolist() == [4.0] * 10


def test_large_bag_with_tiny_gradients_in_float32():
    encoded, g_z, g_r = random_bag(20_000, width=8)
    subset = sample_subset(encoded, 1e-15 * g_z, 1e-15 * g_r, 1.0, 2048)
    assert len(subset.rows) == 2048
    assert subset.weights.isfinite().all()
    assert subset.weights.min() >= 1
    # the sum of the importances is estimated exactly by every sample
    sizes = encoded.z_KD.var(0).mean().sqrt() * g_z.norm(dim=1) + encoded.r_K.std() * g_r.abs()
    assert float(subset.weights @ sizes[subset.rows]) == pytest.approx(float(sizes.sum()), rel=1e-4)


def test_sample_depends_on_the_generator():
    bag = random_bag(100)
    first, again, other = (
        sample_subset(*bag, 1.0, 10, torch.Generator().manual_seed(seed)).rows.tolist() for seed in (3, 3, 4)
    )
    assert first == again != other
    torch.manual_seed(3)
    assert sample_subset(*bag, 1.0, 10).rows.tolist() == first, "None: the default generator of torch"


def test_subset_of_no_tiles_is_an_error():
    with pytest.raises(SettingError, match="at least 1 tile"):
        sample_subset(*random_bag(5), 1.0, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_gpu_samples_the_same_tiles():
    encoded, g_z, g_r = random_bag(1000)
    on_cpu = sample_subset(encoded, g_z, g_r, 1.0, 100, torch.Generator().manual_seed(0))
    on_gpu = EncodedTiles(*(values.cuda() for values in encoded))
    sampled = sample_subset(on_gpu, g_z.cuda(), g_r.cuda(), 1.0, 100, torch.Generator().manual_seed(0))
    assert sampled.weights.device.type == "cuda"
    assert sampled.rows.device.type == "cpu"
    assert len(np.intersect1d(on_cpu.rows, sampled.rows)) >= 98  # rounding may change a few tiles
    torch.testing.assert_close(sampled.weights.cpu().sum(), on_cpu.weights.sum(), rtol=0.1, atol=0)

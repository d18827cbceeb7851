"""Eq. 1: a tile's raw attention is the CLS row of the last block, averaged over heads and patch tokens."""

import pytest
import torch
from support import FAMILIES, full_attention, random_tiles, relative_difference, small_encoder


@pytest.mark.parametrize("family", FAMILIES)
def test_raw_attention_equals_the_full_attention_matrix(family):
    encoder = small_encoder(family).eval()
    tiles = random_tiles(encoder)
    attention_KHNN, _ = full_attention(encoder, tiles)
    prefix = encoder.vit.num_prefix_tokens
    expected_K = attention_KHNN[:, :, 0, prefix:].mean((1, 2))
    _, r_K = encoder(tiles)
    torch.testing.assert_close(r_K, expected_K, rtol=1e-12, atol=0)
    assert r_K.std() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_feature_equals_the_output_of_the_vit(family):
    encoder = small_encoder(family).eval()
    tiles = random_tiles(encoder)
    _, tokens_KND = full_attention(encoder, tiles)
    expected_KD = tokens_KND[:, 0]
    if encoder.feature == "cls+mean":
        expected_KD = torch.cat([expected_KD, tokens_KND[:, encoder.vit.num_prefix_tokens :].mean(1)], 1)
    z_KD, _ = encoder(tiles)
    torch.testing.assert_close(z_KD, expected_KD, rtol=1e-10, atol=1e-12)
    assert z_KD.shape[1] == encoder.feature_size


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_of_raw_attention_equals_that_of_the_full_matrix(family):
    encoder = small_encoder(family).eval()
    tiles = random_tiles(encoder)
    direction_K = torch.linspace(-1, 1, len(tiles), dtype=torch.float64)

    def gradient(r_K):
        parameters = list(encoder.vit.parameters())
        gradients = torch.autograd.grad((r_K * direction_K).sum(), parameters, materialize_grads=True)
        return torch.cat([g.flatten() for g in gradients])

    attention_KHNN, _ = full_attention(encoder, tiles)
    expected = gradient(attention_KHNN[:, :, 0, encoder.vit.num_prefix_tokens :].mean((1, 2)))
    assert expected.norm() > 0
    assert relative_difference(gradient(encoder(tiles).r_K), expected) < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_raw_attention_is_the_attention_that_prefix_tokens_do_not_get(family):
    encoder = small_encoder(family).eval()
    tiles = random_tiles(encoder)
    attention_KHNN, _ = full_attention(encoder, tiles)
    row_KN = attention_KHNN[:, :, 0].mean(1)
    tokens, prefix = row_KN.shape[1], encoder.vit.num_prefix_tokens
    # the mean over all tokens is constant and carries no information
    torch.testing.assert_close(row_KN.mean(1), torch.full((5,), 1 / tokens, dtype=torch.float64))
    prefix_K = row_KN[:, :prefix].sum(1)
    torch.testing.assert_close(encoder(tiles).r_K, (1 - prefix_K) / (tokens - prefix))


def test_raw_attention_is_float32_under_autocast():
    encoder = small_encoder(dtype=torch.float32).eval()
    tiles = random_tiles(encoder, 32)
    exact_K = encoder(tiles).r_K
    with torch.autocast("cpu", torch.bfloat16):
        z_KD, r_K = encoder(tiles)
    assert z_KD.dtype == r_K.dtype == torch.float32
    assert len(r_K.unique()) == 32, "bfloat16 would have only a few different values"
    ranks, exact_ranks = r_K.argsort().argsort().double(), exact_K.argsort().argsort().double()
    assert torch.corrcoef(torch.stack([ranks, exact_ranks]))[0, 1] > 0.99

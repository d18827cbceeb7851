"""Finding, checking and loading weights, and errors of invalid files."""

import argparse
import dataclasses
import hashlib
import json
from fractions import Fraction

import pytest
import torch
from safetensors.torch import save_file
from support import random_tiles, randomise, small_card

from tapfm.encoders.build import build_vit
from tapfm.encoders.weights import _resample_positions as resample_positions
from tapfm.encoders.weights import load_encoder
from tapfm.errors import (
    WeightsDigestError,
    WeightsError,
    WeightsMismatchError,
    WeightsNotFoundError,
)


@pytest.fixture
def card():
    return small_card("h-optimus-1")


@pytest.fixture
def state(card):
    torch.manual_seed(0)
    vit = build_vit(card)
    randomise(vit)
    return vit.state_dict()


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pth", ".pt"])
def test_every_parameter_is_loaded_from_the_file(card, state, tmp_path, suffix):
    file = tmp_path / f"weights{suffix}"
    save_file(state, file) if suffix == ".safetensors" else torch.save(state, file)
    encoder, _, provenance = load_encoder(card, weights=file)
    loaded = encoder.vit.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    assert all(p.requires_grad for p in encoder.parameters())
    assert (provenance.file, provenance.sha256, provenance.published) == (file, sha256(file), None)
    assert encoder(random_tiles(encoder)).z_KD.isfinite().all()


def test_half_precision_weights_are_converted_to_float32(card, state, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({name: value.half() for name, value in state.items()}, file)
    encoder = load_encoder(card, weights=file).encoder
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}


def test_rotary_buffers_missing_in_the_file_are_computed(tmp_path):
    card = dataclasses.replace(
        small_card("dinov3-s16", width=96), arguments={"depth": 2, "embed_dim": 96, "num_heads": 3}
    )
    vit = build_vit(card).eval()
    save_file(vit.state_dict(), tmp_path / "model.safetensors")
    encoder, _, provenance = load_encoder(card, weights=tmp_path)
    tiles = random_tiles(encoder)
    expected = vit.forward_features((tiles.float() - encoder.mean) / encoder.std)[:, 0]
    torch.testing.assert_close(encoder.eval()(tiles).z_KD, expected, rtol=1e-4, atol=1e-5)
    assert provenance.position_embedding.startswith("rotary")


def test_weights_are_found_in_a_hub_cache_folder(card, state, tmp_path):
    snapshot = tmp_path / "models--bioptimus--H-optimus-1" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    save_file(state, snapshot / "model.safetensors")
    assert load_encoder(card, weights=tmp_path).provenance.file == snapshot / "model.safetensors"


def test_digest_is_checked_for_the_published_file_in_a_folder(card, state, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(state, file)
    known = dataclasses.replace(card, sha256=sha256(file))
    assert load_encoder(known, weights=tmp_path).provenance.published is True
    damaged = dataclasses.replace(card, sha256="0" * 64)
    with pytest.raises(WeightsDigestError, match=sha256(file)) as raised:
        load_encoder(damaged, weights=tmp_path)
    assert f"--weights {file}" in raised.value.hint
    assert load_encoder(damaged, weights=file).provenance.published is False, "a file of the user is accepted"


def apply_change(state, change):
    state = dict(state)
    change(state)
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("blocks.1.attn.qkv.bias"), r"missing     blocks.1.attn.qkv.bias \[144\]"),
        (lambda s: s.update({"blocks.2.norm1.weight": torch.ones(48)}), r"unexpected  blocks.2.norm1.weight \[48\]"),
        (
            lambda s: s.update({"patch_embed.proj.weight": torch.zeros(48, 3, 16, 16)}),
            r"wrong shape patch_embed.proj.weight: \[48, 3, 16, 16\] in the file, \[48, 3, 14, 14\] in the encoder",
        ),
        (
            lambda s: s.update({"pos_embed": torch.zeros(1, 25, 48)}),
            r"wrong shape pos_embed: \[1, 25, 48\] in the file, \[1, 16, 48\]",
        ),
        (lambda s: s.update({"fc_norm.weight": torch.ones(48)}), "unexpected  fc_norm.weight"),
    ],
    ids=["missing", "unexpected", "patch size", "position embedding", "averaged model"],
)
def test_mismatched_tensors_are_an_error_that_names_them(card, state, tmp_path, change, message):
    file = tmp_path / "model.safetensors"
    save_file(apply_change(state, change), file)
    with pytest.raises(WeightsMismatchError, match=message):
        load_encoder(card, weights=file)


def test_only_the_first_mismatches_are_listed(card, tmp_path):
    other = small_card("phikon-v2")
    save_file(build_vit(other).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatchError) as raised:
        load_encoder(card, weights=tmp_path / "model.safetensors")
    assert "tensors missing" in raised.value.message
    assert len(raised.value.message.splitlines()) <= 1 + 3 * 5


def test_known_pretraining_tensors_are_dropped(card, state, tmp_path):
    extra = {"head.weight": torch.ones(3), "mask_token": torch.zeros(1, 48)}
    save_file(state | extra, tmp_path / "model.safetensors")
    assert load_encoder(card, weights=tmp_path).encoder.vit.state_dict().keys() == state.keys()


def test_another_tile_size_resamples_positions(card, state, tmp_path):
    save_file(state, tmp_path / "model.safetensors")
    encoder, _, provenance = load_encoder(card, weights=tmp_path, tile_px=84)
    assert encoder.tile_px == 84
    assert provenance.position_embedding == "resampled from 4 x 4 to 6 x 6 patches as timm does"
    assert encoder(random_tiles(encoder)).z_KD.isfinite().all()


def test_dino_resampling_passes_the_scale():
    torch.manual_seed(0)
    table = torch.randn(1, 1 + 14 * 14, 8)
    ours = resample_positions(table, 14, 16, 1, "dino")
    grid = table[:, 1:].reshape(1, 14, 14, 8).permute(0, 3, 1, 2)
    scale = (16 + 0.1) / 14
    expected = torch.nn.functional.interpolate(grid, scale_factor=(scale, scale), mode="bicubic")
    torch.testing.assert_close(ours[:, 1:], expected.permute(0, 2, 3, 1).reshape(1, 256, 8))
    torch.testing.assert_close(ours[:, :1], table[:, :1])
    assert not torch.allclose(ours, resample_positions(table, 14, 16, 1, "transformers"), atol=1e-3)


def test_feature_and_drop_path_can_be_set(card, state, tmp_path):
    save_file(state, tmp_path / "model.safetensors")
    encoder = load_encoder(card, weights=tmp_path, feature="cls+mean", extra={"drop_path_rate": 0.2}).encoder
    assert encoder.feature_size == 96
    assert encoder.vit.blocks[-1].drop_path1.drop_prob == pytest.approx(0.2)


def test_invalid_weights_files_are_an_error(card, state, tmp_path):
    broken = tmp_path / "broken.safetensors"
    save_file(state, broken)
    broken.write_bytes(broken.read_bytes()[:1000])
    for file, message in (
        (broken, "cannot be read as weights"),
        (save_torch(tmp_path / "objects.pth", {"model": Fraction(1, 3)}), "Python objects"),
        (write_bytes(tmp_path / "nothing.pth", b""), "is empty"),
        (write_bytes(tmp_path / "pointer.bin", b"version https://git-lfs.github.com/spec/v1"), "a git LFS pointer"),
        (write_bytes(tmp_path / "page.bin", b"<!doctype html>"), "a web page"),
        (write_bytes(tmp_path / "noise.pth", b"not a checkpoint"), "not a checkpoint"),
        (save_torch(tmp_path / "numbered.pth", {1: torch.zeros(1)}), "not a dictionary of tensors"),
        (save_torch(tmp_path / "registers.pth", {"register_tokens": torch.zeros(1, 4, 48)}), "does not match"),
        (save_torch(tmp_path / "list.pth", [1, 2]), "contains a list"),
        (tmp_path / "absent.pth", "There is no file or folder"),
        (save_torch(tmp_path / "weights.txt", {}), "is not a weights file"),
    ):
        with pytest.raises(WeightsError, match=message) as raised:
            load_encoder(card, weights=file)
        assert raised.value.hint


def test_error_of_missing_weights_says_what_to_do(card, tmp_path):
    with pytest.raises(WeightsNotFoundError, match=r"looked for model.safetensors"):
        load_encoder(card, weights=tmp_path)
    with pytest.raises(WeightsNotFoundError, match="not on the Hugging Face Hub") as raised:
        load_encoder("hipt-vit256")
    assert "github.com/mahmoodlab/HIPT" in raised.value.hint
    assert "--weights" in raised.value.hint
    (tmp_path / "vit256_small_dino.pth").write_bytes(b"damaged")
    with pytest.raises(WeightsDigestError) as raised:
        load_encoder("hipt-vit256", weights=tmp_path)
    assert "github.com/mahmoodlab/HIPT" in raised.value.hint


def test_integer_and_nan_weights_are_an_error(card, state, tmp_path):
    for bad in (torch.ones(48, dtype=torch.int8), torch.full((48,), float("nan"))):
        save_file(state | {"norm.weight": bad}, tmp_path / "model.safetensors")
        with pytest.raises(WeightsMismatchError, match=r"integers, NaN or infinite values: norm.weight"):
            load_encoder(card, weights=tmp_path)


def test_tensors_that_share_memory_become_separate_parameters(card, state, tmp_path):
    shared = torch.ones(48)
    tied = state | {"norm.weight": shared, "norm.bias": shared}
    encoder = load_encoder(card, weights=save_torch(tmp_path / "tied.pth", tied)).encoder
    assert encoder.vit.norm.weight.data_ptr() != encoder.vit.norm.bias.data_ptr()


def test_dino_checkpoint_with_argparse_namespace_is_loaded(tmp_path):
    card = small_card("hipt-vit256", resampling=None)
    vit = build_vit(card)
    teacher = {f"backbone.{name}": value for name, value in vit.state_dict().items()}
    content = {
        "teacher": teacher | {"head.mlp.0.weight": torch.zeros(2)},
        "epoch": 9,
        "args": argparse.Namespace(lr=1.0),
    }
    encoder = load_encoder(card, weights=save_torch(tmp_path / "vit256_small_dino.pth", content)).encoder
    assert torch.equal(encoder.vit.cls_token, vit.cls_token)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architecture": "vit_giant", "model_args": {"num_heads": 4}}, "num_heads is 4"),
        (
            {"architecture": "vit_giant", "model_args": {"act_layer": "gelu"}},
            "act_layer is gelu .* silu in the encoder",
        ),
        ([], "not a model configuration"),
    ],
)
def test_mismatch_with_a_timm_config_is_an_error(card, state, tmp_path, config, message):
    file = tmp_path / "model.safetensors"
    save_file(state, file)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for weights in (file, tmp_path):
        with pytest.raises(WeightsError, match=message):
            load_encoder(card, weights=weights)


def write_bytes(path, content):
    path.write_bytes(content)
    return path


def save_torch(path, content):
    torch.save(content, path)
    return path

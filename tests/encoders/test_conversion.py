"""Converted checkpoints of other libraries give the same features as those libraries."""

import dataclasses
import logging

import pytest
import torch
import transformers
from support import random_tiles, randomise, small_card
from timm.models.vision_transformer import checkpoint_filter_fn

from tapfm.encoders.build import build_vit
from tapfm.encoders.conversion import convert_to_timm
from tapfm.encoders.weights import load_encoder
from tapfm.errors import WeightsMismatchError

TRANSFORMERS = {
    "phikon": (transformers.ViTConfig, transformers.ViTModel, {"patch_size": 16, "layer_norm_eps": 1e-12}),
    "phikon-v2": (transformers.Dinov2Config, transformers.Dinov2Model, {"patch_size": 16}),
    "midnight-12k": (transformers.Dinov2Config, transformers.Dinov2Model, {"patch_size": 14, "use_swiglu_ffn": True}),
    "hibou-b": (
        transformers.Dinov2WithRegistersConfig,
        transformers.Dinov2WithRegistersModel,
        {"patch_size": 14, "use_swiglu_ffn": True},
    ),
}


def save_transformers_model(key, folder, card, **changes):
    """Save a model with random weights with `save_pretrained`, which renames some keys, and return it."""
    config_class, model_class, settings = TRANSFORMERS[key]
    settings = settings | changes
    if config_class is transformers.ViTConfig:
        settings["intermediate_size"] = 4 * 48
    config = config_class(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=settings.pop("heads", 3),
        image_size=card.position_px,
        **settings,
    )
    torch.manual_seed(0)
    model = model_class(config).eval()
    randomise(model)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("key", TRANSFORMERS)
def test_transformers_checkpoints_give_the_same_features(key, tmp_path):
    card = small_card(key)
    model = save_transformers_model(key, tmp_path, card)
    encoder, _, provenance = load_encoder(card, weights=tmp_path)
    assert provenance.position_embedding == "as trained"
    assert_same_features(encoder, model)


@pytest.mark.parametrize("key", ["phikon-v2", "midnight-12k"])
def test_positions_are_resampled_like_in_transformers(key, tmp_path):
    small = small_card(key)
    card = dataclasses.replace(small, position_px=2 * small.tile_px, resampling="transformers")
    model = save_transformers_model(key, tmp_path, card)
    encoder, _, provenance = load_encoder(card, weights=tmp_path)
    assert provenance.position_embedding == "resampled from 8 x 8 to 4 x 4 patches as transformers does"
    assert_same_features(encoder, model)
    resampled_filtered_by_timm = load_encoder(dataclasses.replace(card, resampling="timm"), weights=tmp_path).encoder
    with pytest.raises(AssertionError):
        assert_same_features(resampled_filtered_by_timm, model)


def assert_same_features(encoder, model):
    tiles = random_tiles(encoder)
    with torch.no_grad():
        tokens = model(pixel_values=(tiles.float() - encoder.mean) / encoder.std).last_hidden_state
        z_KD = encoder.eval()(tiles).z_KD
    expected = tokens[:, 0]
    if encoder.feature == "cls+mean":
        expected = torch.cat([expected, tokens[:, encoder.vit.num_prefix_tokens :].mean(1)], 1)
    torch.testing.assert_close(z_KD, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("phikon", {"heads": 4}, "num_attention_heads is 4"),
        ("phikon", {"layer_norm_eps": 1e-6}, "layer_norm_eps is 1e-06"),
        ("phikon", {"hidden_act": "relu"}, "hidden_act is relu .* gelu in the encoder"),
        ("midnight-12k", {"heads": 6}, "num_attention_heads is 6"),
    ],
)
def test_mismatch_with_the_model_config_is_an_error(key, change, message, tmp_path):
    card = small_card(key)
    save_transformers_model(key, tmp_path, card, **change)
    with pytest.raises(WeightsMismatchError, match=message):
        load_encoder(card, weights=tmp_path)


def convert_to_dinov2_keys(vit, *, mask_token=True):
    """Return the weights of a timm model with the keys of Meta's DINOv2 code, where CLS has a separate position."""
    generator = torch.Generator().manual_seed(1)
    native = {}
    for name, value in vit.state_dict().items():
        name = name.replace(".mlp.fc1.", ".mlp.w12.").replace(".mlp.fc2.", ".mlp.w3.") if "Glu" in str(vit) else name
        native[name] = value.clone()
    if "reg_token" in native:
        native["register_tokens"] = native.pop("reg_token")
        cls_position = torch.randn(1, 1, value.shape[-1], generator=generator)
        native["pos_embed"] = torch.cat([cls_position, native["pos_embed"]], 1)
        native["cls_token"] = native["cls_token"] - cls_position
    if mask_token:
        native["mask_token"] = torch.zeros(1, value.shape[-1])
    return native


@pytest.mark.parametrize("key", ["gpfm", "openmidnight", "midnight-12k", "hibou-b"])
def test_dinov2_keys_are_converted_like_in_timm(key):
    vit = build_vit(small_card(key))
    randomise(vit)
    native = convert_to_dinov2_keys(vit)
    filtered_by_timm = checkpoint_filter_fn(dict(native), vit)
    ours = convert_to_timm(native)
    assert ours.keys() == filtered_by_timm.keys() == vit.state_dict().keys()
    for name, value in filtered_by_timm.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0)


def test_dinov2_keys_without_mask_token_are_converted():
    """The filter of timm fails without it."""
    vit = build_vit(small_card("openmidnight"))
    assert convert_to_timm(convert_to_dinov2_keys(vit, mask_token=False)).keys() == vit.state_dict().keys()


@pytest.mark.parametrize("wrapper", ["teacher", "model", "state_dict"])
def test_wrappers_prefixes_and_chunked_blocks_are_removed(wrapper):
    vit = build_vit(small_card("openpath"))
    native = convert_to_dinov2_keys(vit)
    chunked = {name.replace("blocks.", "blocks.0.", 1): value for name, value in native.items()}
    checkpoint = {f"backbone.{name}": value for name, value in chunked.items()}
    checkpoint["dino_head.last_layer.weight"] = torch.zeros(3)
    ours = convert_to_timm({wrapper: {f"module.{name}": value for name, value in checkpoint.items()}, "epoch": 3})
    assert ours.keys() == vit.state_dict().keys()


def test_checkpoint_that_is_not_a_dictionary_of_tensors_is_an_error():
    with pytest.raises(WeightsMismatchError, match="epoch"):
        convert_to_timm({"epoch": 3, "weight": torch.zeros(1)})
    with pytest.raises(WeightsMismatchError, match="empty"):
        convert_to_timm({})


@pytest.fixture(autouse=True)
def silence_transformers():
    logging.getLogger("transformers").setLevel(logging.ERROR)

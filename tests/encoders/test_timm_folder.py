"""An encoder that is written as a folder gives the same features when timm loads it."""

import dataclasses
import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from support import FAMILIES, random_tiles, randomise, relative_difference, small_card

from tapfm.encoders.adapters import Scope, apply_scope, find_lora_layers, merge_adapters
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card, load_encoder_cards
from tapfm.encoders.timm_folder import _build_timm_config as timm_config
from tapfm.encoders.timm_folder import check_timm_folder, extra_timm_arguments, write_timm_folder
from tapfm.encoders.vit import VitEncoder
from tapfm.encoders.weights import load_encoder
from tapfm.errors import InputError, WeightsError, WeightsMismatchError

KEYS = [*(key for key, _ in FAMILIES.values()), "gigapath-flash", "hibou-b", "phikon"]


def build_encoder(card, *, seed=0, **extra):
    torch.manual_seed(seed)
    vit = build_vit(card, extra=extra)
    randomise(vit, seed)
    return VitEncoder(vit, mean=card.mean, std=card.std, feature=card.feature).eval()


@pytest.fixture
def card():
    return small_card("h-optimus-0")


@pytest.fixture
def encoder(card):
    return build_encoder(card)


@pytest.mark.parametrize("key", KEYS)
def test_every_family_can_be_loaded_by_timm_and_tapfm(key, tmp_path):
    card = small_card(key)
    encoder = build_encoder(card)
    write_timm_folder(encoder, card, tmp_path / "out")
    check_timm_folder(tmp_path / "out", encoder)
    loaded = load_encoder(card, weights=tmp_path / "out").encoder.eval()
    tiles = random_tiles(encoder)
    assert torch.equal(loaded(tiles).z_KD, encoder(tiles).z_KD)
    assert torch.equal(loaded(tiles).r_K, encoder(tiles).r_K)


def test_pocket_encoder_is_written_and_loaded(tmp_path):
    encoder, card, _ = load_encoder("tapfm-pocket")
    write_timm_folder(encoder.train(), card, tmp_path)
    check_timm_folder(tmp_path, encoder)
    assert encoder.training, "the check must restore the training mode"
    reloaded = load_encoder(card, weights=tmp_path / "model.safetensors")
    assert reloaded.provenance.published is False, "the weights are float32 now, so the digest differs"
    assert all(torch.equal(a, b) for a, b in zip(reloaded.encoder.parameters(), encoder.parameters(), strict=True))


@pytest.mark.parametrize(
    "key", [key for key, card in load_encoder_cards().items() if card.arguments.get("mlp") == "swiglu"]
)
def test_swiglu_encoders_have_the_right_shapes_at_full_size(key):
    """They are written as another architecture of timm, because its config.json cannot name a class."""
    card = find_encoder_card(key)
    with torch.device("meta"):
        encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std, feature=card.feature)
        config = json.loads(json.dumps(timm_config(encoder, card, {})))
        loaded = timm.create_model(config["architecture"], num_classes=0, **config["model_args"])
    shapes = {name: tensor.shape for name, tensor in encoder.vit.state_dict().items()}
    assert {name: tensor.shape for name, tensor in loaded.state_dict().items()} == shapes
    for found, expected in zip(loaded.modules(), encoder.vit.modules(), strict=True):
        assert type(found) is type(expected)
        for attribute in ("num_heads", "eps", "scale"):
            assert getattr(found, attribute, None) == getattr(expected, attribute, None)


def test_swiglu_without_layer_scale(tmp_path):
    card = small_card("gigapath-flash")
    card = dataclasses.replace(card, arguments={k: v for k, v in card.arguments.items() if k != "init_values"})
    encoder = build_encoder(card)
    write_timm_folder(encoder, card, tmp_path)
    check_timm_folder(tmp_path, encoder)


def test_extra_timm_arguments_are_needed_only_for_layer_norm_eps(tmp_path):
    assert {key for key, card in load_encoder_cards().items() if extra_timm_arguments(card)} == {"phikon"}
    card = small_card("phikon")
    encoder = build_encoder(card)
    write_timm_folder(encoder, card, tmp_path)
    import functools  # used by the evaluated text

    arguments = eval(f"dict({extra_timm_arguments(card)})", {"functools": functools, "torch": torch})
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, **arguments)
    assert {module.eps for module in loaded.modules() if isinstance(module, torch.nn.LayerNorm)} == {1e-12}


def test_data_config_of_timm_matches_the_card(card, encoder, tmp_path):
    write_timm_folder(encoder, card, tmp_path)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    data_config = timm.data.resolve_model_data_config(loaded)
    assert (tuple(data_config["mean"]), tuple(data_config["std"])) == (card.mean, card.std)
    assert tuple(data_config["input_size"]) == (3, card.tile_px, card.tile_px)
    assert data_config["crop_pct"] == 1.0
    assert loaded.num_classes == 0
    with_head = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=2)
    assert torch.equal(with_head.blocks[1].mlp.fc1.weight, encoder.vit.blocks[1].mlp.fc1.weight)


def test_config_contains_metadata_and_licence(card, encoder, tmp_path):
    write_timm_folder(encoder, card, tmp_path, metadata={"run": "fgfr3", "scope": "lora:16"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tapfm"] | {"run": "fgfr3", "scope": "lora:16", "encoder": "h-optimus-0"} == config["tapfm"]
    assert config["pretrained_cfg"]["license"] == card.licence


def test_tile_size_other_than_the_cards_is_written(card, tmp_path):
    encoder = build_encoder(card, img_size=84)
    write_timm_folder(encoder, card, tmp_path)
    check_timm_folder(tmp_path, encoder)
    assert load_encoder(card, weights=tmp_path, tile_px=84).encoder.tile_px == 84


def test_half_precision_encoder_is_written_in_float32(card, encoder, tmp_path):
    encoder.vit.bfloat16()
    write_timm_folder(encoder, card, tmp_path)
    check_timm_folder(tmp_path, encoder)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}


def test_adapters_must_be_merged_first(card, encoder, tmp_path):
    tiles = random_tiles(encoder)
    plain = encoder(tiles).z_KD
    apply_scope(encoder, Scope("lora", 2))
    for layer in find_lora_layers(encoder).values():
        randomise(layer.lora_B)
    with pytest.raises(WeightsError, match="merge_adapters"):
        write_timm_folder(encoder, card, tmp_path)
    assert not list(tmp_path.iterdir())
    merge_adapters(encoder)
    write_timm_folder(encoder, card, tmp_path)
    check_timm_folder(tmp_path, encoder)
    loaded = load_encoder(card, weights=tmp_path).encoder.eval()
    assert relative_difference(loaded(tiles).z_KD.detach(), plain.detach()) > 0.01


def test_check_detects_other_weights_other_mean_and_damaged_folder(card, encoder, tmp_path):
    write_timm_folder(encoder, card, tmp_path)
    with pytest.raises(WeightsMismatchError, match="features differ"):
        check_timm_folder(tmp_path, build_encoder(card, seed=1))
    config = json.loads((tmp_path / "config.json").read_text())
    config["pretrained_cfg"]["mean"] = [0.5, 0.5, 0.5]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsMismatchError, match="features differ"):
        check_timm_folder(tmp_path, encoder)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsMismatchError, match="timm cannot load"):
        check_timm_folder(tmp_path, encoder)


def test_writing_again_replaces_only_the_model(card, encoder, tmp_path):
    write_timm_folder(build_encoder(card, seed=1), card, tmp_path)
    (tmp_path / "README.md").write_text("mine")
    write_timm_folder(encoder, card, tmp_path)
    check_timm_folder(tmp_path, encoder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_model_of_another_tool_is_not_overwritten(card, encoder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="not a folder"):
        write_timm_folder(encoder, card, tmp_path / "file")
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    for config in (None, "{}", "[1]", "not JSON"):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        with pytest.raises(InputError, match="tapfm did not write"):
            write_timm_folder(encoder, card, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_interrupted_write_never_mixes_old_and_new_files(card, encoder, tmp_path, monkeypatch):
    old = build_encoder(card, seed=1)
    for stop in ("timm_folder.save_file", "timm_folder.os.fsync", "timm_folder.write_atomically"):
        write_timm_folder(old, card, tmp_path)

        def interrupt(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(f"tapfm.encoders.{stop}", interrupt)
            with pytest.raises(KeyboardInterrupt):
                write_timm_folder(encoder, card, tmp_path)
        if (tmp_path / "config.json").exists():
            check_timm_folder(tmp_path, old)
        else:
            with pytest.raises(WeightsMismatchError, match="timm cannot load"):
                check_timm_folder(tmp_path, encoder)
        assert not list(tmp_path.glob("*.unfinished")) + list(tmp_path.glob(".*"))
    write_timm_folder(encoder, card, tmp_path)  # works after the interruptions
    check_timm_folder(tmp_path, encoder)

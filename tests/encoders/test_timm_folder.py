"""An encoder written as a folder is, loaded by timm alone, the same encoder."""

import dataclasses
import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from support import FAMILIES, randomise, relative_difference, small_card, some_tiles

from tapfm.encoders.adapters import Scope, apply_scope, find_lora_layers, merge_adapters
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import encoder_card, encoder_cards
from tapfm.encoders.timm_folder import _timm_config as timm_config
from tapfm.encoders.timm_folder import check_timm_folder, extra_timm_arguments, write_timm_folder
from tapfm.encoders.vit import VitEncoder
from tapfm.encoders.weights import load_encoder
from tapfm.errors import InputError, WeightsError, WeightsMismatchError

KEYS = [*(key for key, _ in FAMILIES.values()), "gigapath-flash", "hibou-b", "phikon"]


def encoder_of(card, *, seed=0, **extra):
    torch.manual_seed(seed)
    vit = build_vit(card, extra=extra)
    randomise(vit, seed)
    return VitEncoder(vit, mean=card.mean, std=card.std, feature=card.feature).eval()


@pytest.fixture
def card():
    return small_card("h-optimus-0")


@pytest.fixture
def encoder(card):
    return encoder_of(card)


@pytest.mark.parametrize("key", KEYS)
def test_timm_loads_every_family_and_so_do_we(key, tmp_path):
    card = small_card(key)
    encoder = encoder_of(card)
    write_timm_folder(encoder, card, tmp_path / "out")
    check_timm_folder(tmp_path / "out", encoder)
    loaded = load_encoder(card, weights=tmp_path / "out").encoder.eval()
    tiles = some_tiles(encoder)
    assert torch.equal(loaded(tiles).z_KD, encoder(tiles).z_KD)
    assert torch.equal(loaded(tiles).r_K, encoder(tiles).r_K)


def test_the_pocket_encoder_goes_out_and_comes_back(tmp_path):
    encoder, card, _ = load_encoder("tapfm-pocket")
    write_timm_folder(encoder.train(), card, tmp_path)
    check_timm_folder(tmp_path, encoder)
    assert encoder.training, "checked without leaving a mark"
    again = load_encoder(card, weights=tmp_path / "model.safetensors")
    assert again.provenance.published is False, "float32 now, and so weights of one's own"
    assert all(torch.equal(a, b) for a, b in zip(again.encoder.parameters(), encoder.parameters(), strict=True))


@pytest.mark.parametrize("key", [key for key, card in encoder_cards().items() if card.arguments.get("mlp") == "swiglu"])
def test_at_its_real_size_a_swiglu_has_every_shape_it_should(key):
    """They are written as another architecture of timm's, since its configuration cannot name a class."""
    card = encoder_card(key)
    with torch.device("meta"):
        encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std, feature=card.feature)
        config = json.loads(json.dumps(timm_config(encoder, card, {})))
        stranger = timm.create_model(config["architecture"], num_classes=0, **config["model_args"])
    shapes = {name: tensor.shape for name, tensor in encoder.vit.state_dict().items()}
    assert {name: tensor.shape for name, tensor in stranger.state_dict().items()} == shapes
    for found, wanted in zip(stranger.modules(), encoder.vit.modules(), strict=True):
        assert type(found) is type(wanted)
        for fact in ("num_heads", "eps", "scale"):
            assert getattr(found, fact, None) == getattr(wanted, fact, None)


def test_a_swiglu_without_layer_scale_keeps_none(tmp_path):
    card = small_card("gigapath-flash")
    card = dataclasses.replace(card, arguments={k: v for k, v in card.arguments.items() if k != "init_values"})
    encoder = encoder_of(card)
    write_timm_folder(encoder, card, tmp_path)
    check_timm_folder(tmp_path, encoder)


def test_only_an_epsilon_of_its_own_has_to_be_told_to_timm(tmp_path):
    assert {key for key, card in encoder_cards().items() if extra_timm_arguments(card)} == {"phikon"}
    card = small_card("phikon")
    encoder = encoder_of(card)
    write_timm_folder(encoder, card, tmp_path)
    import functools  # as the text has it

    given = eval(f"dict({extra_timm_arguments(card)})", {"functools": functools, "torch": torch})
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, **given)
    assert {module.eps for module in loaded.modules() if isinstance(module, torch.nn.LayerNorm)} == {1e-12}


def test_timms_own_preparation_of_pixels_is_the_cards(card, encoder, tmp_path):
    write_timm_folder(encoder, card, tmp_path)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    facts = timm.data.resolve_model_data_config(loaded)
    assert (tuple(facts["mean"]), tuple(facts["std"])) == (card.mean, card.std)
    assert tuple(facts["input_size"]) == (3, card.tile_px, card.tile_px)
    assert facts["crop_pct"] == 1.0
    assert loaded.num_classes == 0
    with_a_head = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=2)
    assert torch.equal(with_a_head.blocks[1].mlp.fc1.weight, encoder.vit.blocks[1].mlp.fc1.weight)


def test_the_configuration_says_where_it_comes_from(card, encoder, tmp_path):
    write_timm_folder(encoder, card, tmp_path, about={"run": "fgfr3", "scope": "lora:16"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tapfm"] | {"run": "fgfr3", "scope": "lora:16", "encoder": "h-optimus-0"} == config["tapfm"]
    assert config["pretrained_cfg"]["license"] == card.licence


def test_another_tile_size_than_the_cards_is_kept(card, tmp_path):
    encoder = encoder_of(card, img_size=84)
    write_timm_folder(encoder, card, tmp_path)
    check_timm_folder(tmp_path, encoder)
    assert load_encoder(card, weights=tmp_path, tile_px=84).encoder.tile_px == 84


def test_a_half_precision_encoder_is_written_in_float32(card, encoder, tmp_path):
    encoder.vit.bfloat16()
    write_timm_folder(encoder, card, tmp_path)
    check_timm_folder(tmp_path, encoder)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}


def test_adapters_must_be_merged_first(card, encoder, tmp_path):
    tiles = some_tiles(encoder)
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


def test_the_check_finds_other_weights_other_pixels_and_a_damaged_folder(card, encoder, tmp_path):
    write_timm_folder(encoder, card, tmp_path)
    with pytest.raises(WeightsMismatchError, match="features differ"):
        check_timm_folder(tmp_path, encoder_of(card, seed=1))
    config = json.loads((tmp_path / "config.json").read_text())
    config["pretrained_cfg"]["mean"] = [0.5, 0.5, 0.5]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsMismatchError, match="features differ"):
        check_timm_folder(tmp_path, encoder)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsMismatchError, match="timm does not load"):
        check_timm_folder(tmp_path, encoder)


def test_an_export_replaces_an_earlier_one_and_nothing_else(card, encoder, tmp_path):
    write_timm_folder(encoder_of(card, seed=1), card, tmp_path)
    (tmp_path / "README.md").write_text("mine")
    write_timm_folder(encoder, card, tmp_path)
    check_timm_folder(tmp_path, encoder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_somebody_elses_model_is_not_written_over(card, encoder, tmp_path):
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


def test_stopped_at_any_moment_the_folder_is_old_or_new_or_not_loadable(card, encoder, tmp_path, monkeypatch):
    old = encoder_of(card, seed=1)
    for stop in ("timm_folder.save_file", "timm_folder.os.fsync", "timm_folder.write_atomically"):
        write_timm_folder(old, card, tmp_path)

        def stopped(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(f"tapfm.encoders.{stop}", stopped)
            with pytest.raises(KeyboardInterrupt):
                write_timm_folder(encoder, card, tmp_path)
        if (tmp_path / "config.json").exists():
            check_timm_folder(tmp_path, old)
        else:
            with pytest.raises(WeightsMismatchError, match="timm does not load"):
                check_timm_folder(tmp_path, encoder)
        assert not list(tmp_path.glob("*.unfinished")) + list(tmp_path.glob(".*"))
    write_timm_folder(encoder, card, tmp_path)  # and what was left is gone on from
    check_timm_folder(tmp_path, encoder)

"""The encoder catalogue matches the architectures that it describes."""

import json
import re
from pathlib import Path

import pytest
import torch
from timm.layers import GluMlp

from tapfm.encoders.build import build_vit
from tapfm.encoders.card import card_from_table
from tapfm.encoders.catalog import _UNSUPPORTED as UNSUPPORTED
from tapfm.encoders.catalog import _normalise_name as normalise_name
from tapfm.encoders.catalog import find_encoder_card, load_encoder_cards
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import InputError, UnknownNameError, UnsupportedEncoderError

REQUIRED_KEYS = """
uni uni2-h gigapath h-optimus-0 h-optimus-1 h0-mini virchow virchow2 phikon phikon-v2 kaiko-s8 kaiko-s16 kaiko-b8
kaiko-b16 kaiko-l14 lunit-s8 lunit-s16 gpfm midnight-12k openmidnight openpath hibou-b hibou-l hipt-vit256 mstar
pathorchestra dinov2-s14 dinov2-b14 dinov2-l14 dinov2-g14 dinov3-s16 dinov3-b16 dinov3-l16
""".split()  # noqa: SIM905

SURVEY = Path(__file__).parents[3] / "shared" / "encoders.json"


def test_catalogue_has_every_required_encoder():
    assert set(REQUIRED_KEYS) <= set(load_encoder_cards())


@pytest.mark.parametrize("key", load_encoder_cards())
def test_architecture_matches_the_card(key):
    card = find_encoder_card(key)
    with torch.device("meta"):
        published = build_vit(card, tile_px=card.position_px)
        encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std, feature=card.feature)
    assert sum(p.numel() for p in published.parameters()) == card.parameters
    assert published.num_prefix_tokens == card.prefix_tokens
    assert encoder.feature_size == card.feature_size
    assert encoder.tile_px == card.tile_px
    for block in encoder.vit.blocks:
        if isinstance(block.mlp, GluMlp):
            assert isinstance(block.mlp.act, torch.nn.SiLU), (
                "with GELU the weights would load, but the features would be wrong"
            )


@pytest.mark.parametrize("key", load_encoder_cards())
def test_card_is_complete(key):
    card = find_encoder_card(key)
    assert card.gate in ("none", "terms", "manual")
    assert card.feature in ("cls", "cls+mean")
    assert all(0 < value < 1 for value in (*card.mean, *card.std))
    assert card.licence
    assert card.file
    assert card.repository or card.notes
    assert card.sha256 is None or len(card.sha256) == 64
    assert card.revision is None or len(card.revision) == 40


@pytest.mark.skipif(not SURVEY.exists(), reason="needs ../shared/encoders.json")
def test_cards_match_the_survey_of_encoders():
    entries = {entry["name"]: entry for entry in json.loads(SURVEY.read_text())["encoders"]}
    compared = 0
    packaged = [card for card in load_encoder_cards().values() if card.packaged]
    for card in load_encoder_cards().values():
        if card.packaged:
            continue
        entry = entries.get(card.name) or entries[f"{card.name} (Mount Sinai)"]
        assert card.architecture == entry["timm_arch"]
        assert (card.parameters, card.prefix_tokens) == (entry["params"], entry["prefix_tokens"])
        assert (list(card.mean), list(card.std)) == (entry["mean"], entry["std"])
        assert (card.sha256, card.revision if card.repository else None) == (
            entry.get("weights_sha256"),
            entry.get("weights_revision") if card.repository else None,
        )
        compared += 1
    assert compared == len(load_encoder_cards()) - len(packaged)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("UNI", "uni"),
        (" Uni ", "uni"),
        ("hoptimus0", "h-optimus-0"),
        ("H0_mini", "h0-mini"),
        ("DINOv2 ViT-S/14", "dinov2-s14"),
    ],
)
def test_encoder_is_found_by_key_or_name_in_any_spelling(name, key):
    assert find_encoder_card(name).key == key


def test_normalised_names_are_unique():
    cards = load_encoder_cards()
    assert len({normalise_name(key) for key in cards}) == len(cards)
    assert len({normalise_name(card.name) for card in cards.values()}) == len(cards)


@pytest.mark.parametrize(
    ("name", "nearest"), [("virchwo2", "virchow2"), ("h-optimus-9", "h-optimus-0"), ("un1", "uni")]
)
def test_unknown_name_is_an_error_with_suggestions(name, nearest):
    with pytest.raises(UnknownNameError) as raised:
        find_encoder_card(name)
    assert nearest in raised.value.hint
    assert "tapfm encoders" in raised.value.hint


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_encoder_is_an_error_with_the_reason(name):
    with pytest.raises(UnsupportedEncoderError, match=UNSUPPORTED[name]):
        find_encoder_card(name)
    assert name not in load_encoder_cards()


def test_card_of_a_timm_vit():
    card = find_encoder_card("timm:vit_small_patch16_224.dino")
    assert card.repository == "timm/vit_small_patch16_224.dino"
    assert (card.parameters, card.feature_size, card.tile_px) == (21_665_664, 384, 224)
    assert card.mean == (0.485, 0.456, 0.406)
    assert find_encoder_card("timm:vit_small_patch16_dinov3").prefix_tokens == 5


@pytest.mark.parametrize("name", ["vit_smal", "vit_small_patch16_18x2_22", "deit3_small_patch16_223"])
def test_suggested_timm_models_are_supported(name):
    with pytest.raises(UnknownNameError, match=name) as caught:
        find_encoder_card(f"timm:{name}")
    suggested = re.findall(r"timm:[\w.]+", caught.value.hint)
    assert suggested
    assert all(find_encoder_card(name) for name in suggested)


def test_timm_models_other_than_vits_are_an_error():
    for name in ("resnet18", "swin_tiny_patch4_window7_224", "xcit_nano_12_p8_224", "vit_small_patch16_18x2_224"):
        with pytest.raises(UnsupportedEncoderError, match=name):
            find_encoder_card(f"timm:{name}")
    with pytest.raises(UnknownNameError) as raised:
        find_encoder_card("timm:vit_small_patch16_224.dinoo")
    suggested = re.findall(r"timm:[\w.]+", raised.value.hint)
    assert "timm:vit_small_patch16_224.dino" in suggested
    assert all(find_encoder_card(name) for name in suggested), "each suggestion is a valid name"
    with pytest.raises(UnknownNameError) as raised:
        find_encoder_card("timm:vit_small_patch16_22")
    assert "vit_small_patch16_224" in raised.value.hint


def test_card_with_wrong_fields_is_an_error():
    table = {"name": "X", "tile": 224}
    with pytest.raises(InputError, match=r"unknown fields \['tile'\], missing fields \['architecture'"):
        card_from_table("x", table)


def test_card_must_state_the_resampling_of_positions():
    card = find_encoder_card("dinov2-s14")
    fields = {k: v for k, v in vars(card).items() if k not in ("key", "resampling")}
    with pytest.raises(InputError, match=r"518 px.* 224 px.*resampling"):
        card_from_table("x", fields)

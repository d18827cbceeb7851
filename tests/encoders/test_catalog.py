"""The catalogue against the architectures it describes."""

import json
from pathlib import Path

import pytest
import torch
from timm.layers import GluMlp

from tapfm.encoders.build import build_vit
from tapfm.encoders.card import card_from_table
from tapfm.encoders.catalog import _UNSUPPORTED as NOT_OFFERED
from tapfm.encoders.catalog import _normalise_name as letters_and_digits
from tapfm.encoders.catalog import encoder_card, encoder_cards
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import InputError, UnknownNameError, UnsupportedEncoderError

PROMISED = """
uni uni2-h gigapath h-optimus-0 h-optimus-1 h0-mini virchow virchow2 phikon phikon-v2 kaiko-s8 kaiko-s16 kaiko-b8
kaiko-b16 kaiko-l14 lunit-s8 lunit-s16 gpfm midnight-12k openmidnight openpath hibou-b hibou-l hipt-vit256 mstar
pathorchestra dinov2-s14 dinov2-b14 dinov2-l14 dinov2-g14 dinov3-s16 dinov3-b16 dinov3-l16
""".split()  # noqa: SIM905 - shorter to read

FACTS = Path(__file__).parents[3] / "shared" / "encoders.json"


def test_every_promised_encoder_is_there():
    assert set(PROMISED) <= set(encoder_cards())


@pytest.mark.parametrize("key", encoder_cards())
def test_architecture_is_as_the_card_says(key):
    card = encoder_card(key)
    with torch.device("meta"):
        as_published = build_vit(card, tile_px=card.position_px)
        encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std, feature=card.feature)
    assert sum(p.numel() for p in as_published.parameters()) == card.parameters
    assert as_published.num_prefix_tokens == card.prefix_tokens
    assert encoder.feature_size == card.feature_size
    assert encoder.tile_px == card.tile_px
    for block in encoder.vit.blocks:
        if isinstance(block.mlp, GluMlp):
            assert isinstance(block.mlp.act, torch.nn.SiLU), "loads all the same with GELU, and is wrong"


@pytest.mark.parametrize("key", encoder_cards())
def test_card_is_complete(key):
    card = encoder_card(key)
    assert card.gate in ("none", "terms", "manual")
    assert card.feature in ("cls", "cls+mean")
    assert all(0 < value < 1 for value in (*card.mean, *card.std))
    assert card.licence
    assert card.file
    assert card.repository or card.notes
    assert card.sha256 is None or len(card.sha256) == 64
    assert card.revision is None or len(card.revision) == 40


@pytest.mark.skipif(not FACTS.exists(), reason="the table of facts is not beside the checkout")
def test_cards_repeat_the_table_of_facts():
    facts = {entry["name"]: entry for entry in json.loads(FACTS.read_text())["encoders"]}
    compared = 0
    ours = [card for card in encoder_cards().values() if card.packaged]
    for card in encoder_cards().values():
        if card.packaged:
            continue
        fact = facts.get(card.name) or facts[f"{card.name} (Mount Sinai)"]
        assert card.architecture == fact["timm_arch"]
        assert (card.parameters, card.prefix_tokens) == (fact["params"], fact["prefix_tokens"])
        assert (list(card.mean), list(card.std)) == (fact["mean"], fact["std"])
        assert (card.sha256, card.revision if card.repository else None) == (
            fact.get("weights_sha256"),
            fact.get("weights_revision") if card.repository else None,
        )
        compared += 1
    assert compared == len(encoder_cards()) - len(ours)


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
def test_found_by_key_or_name_however_it_is_spelt(name, key):
    assert encoder_card(name).key == key


def test_no_two_encoders_are_spelt_alike():
    cards = encoder_cards()
    assert len({letters_and_digits(key) for key in cards}) == len(cards)
    assert len({letters_and_digits(card.name) for card in cards.values()}) == len(cards)


@pytest.mark.parametrize(
    ("name", "nearest"), [("virchwo2", "virchow2"), ("h-optimus-9", "h-optimus-0"), ("un1", "uni")]
)
def test_an_unknown_name_gets_the_nearest_ones(name, nearest):
    with pytest.raises(UnknownNameError) as refusal:
        encoder_card(name)
    assert nearest in refusal.value.hint
    assert "tapfm encoders" in refusal.value.hint


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_a_known_encoder_that_is_not_offered_says_why(name):
    with pytest.raises(UnsupportedEncoderError, match=NOT_OFFERED[name]):
        encoder_card(name)
    assert name not in encoder_cards()


def test_any_timm_vit_has_a_card():
    card = encoder_card("timm:vit_small_patch16_224.dino")
    assert card.repository == "timm/vit_small_patch16_224.dino"
    assert (card.parameters, card.feature_size, card.tile_px) == (21_665_664, 384, 224)
    assert card.mean == (0.485, 0.456, 0.406)
    assert encoder_card("timm:vit_small_patch16_dinov3").prefix_tokens == 5


def test_timm_models_that_are_no_vit_are_refused():
    for name in ("resnet18", "swin_tiny_patch4_window7_224", "xcit_nano_12_p8_224", "vit_small_patch16_18x2_224"):
        with pytest.raises(UnsupportedEncoderError, match=name):
            encoder_card(f"timm:{name}")
    with pytest.raises(UnknownNameError) as refusal:
        encoder_card("timm:vit_small_patch16_224.dinoo")
    assert "vit_small_patch16_224.dino" in refusal.value.hint
    with pytest.raises(UnknownNameError) as refusal:
        encoder_card("timm:vit_small_patch16_22")
    assert "vit_small_patch16_224" in refusal.value.hint


def test_a_card_with_wrong_fields_is_refused():
    table = {"name": "X", "tile": 224}
    with pytest.raises(InputError, match=r"unknown fields \['tile'\], missing fields \['architecture'"):
        card_from_table("x", table)


def test_a_card_must_say_how_its_positions_are_resampled():
    card = encoder_card("dinov2-s14")
    fields = {k: v for k, v in vars(card).items() if k not in ("key", "resampling")}
    with pytest.raises(InputError, match=r"518 px .* 224 px"):
        card_from_table("x", fields)

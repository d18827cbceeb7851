"""The catalogue of encoders: a table of facts (`cards.toml`) that can be read without torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources

from tapfm.encoders.card import TIMM_PREFIX, EncoderCard, card_from_table
from tapfm.errors import UnknownNameError, UnsupportedEncoderError

# Known encoders that are not in the catalogue, and why. Facts still missing are no reason to guess them.
_NOT_OFFERED = {
    "conch": "its tile feature is an attention pool over the tokens, not the CLS token",
    "conch-v1.5": "its tile feature is an attention pool over the tokens, not the CLS token",
    "musk": "it is a BEiT3 with text experts beside the vision ones, and reading its checkpoint could not be checked",
    "plip": "its tile feature is a projection of the CLS token into a space shared with text",
    "quiltnet": "its tile feature is a projection of the CLS token into a space shared with text",
    "keep": "its tile feature is a projection of the CLS token into a space shared with text",
    "genbio-pathfm": "its tile feature joins three CLS tokens, one per colour channel",
    "rudolfv-2": "its architecture is published only as remote code, so its checkpoint keys are not known to us",
    "phaet": "its pixel normalisation is not published",
    "mascaret": "its pixel normalisation is not published",
    "prost40m": "its architecture and pixel normalisation are not published",
}


@cache
def encoder_cards() -> Mapping[str, EncoderCard]:
    """Read the whole catalogue, by key, in the order of the file."""
    text = resources.files("tapfm.encoders").joinpath("cards.toml").read_text("utf-8")
    return {key: card_from_table(key, table) for key, table in tomllib.loads(text).items()}


def _letters_and_digits(name: str) -> str:
    """Spelling without what people spell differently: case, blanks, dashes."""
    return "".join(character for character in name.lower() if character.isalnum() or character == "+")


def encoder_card(name: str) -> EncoderCard:
    """Find a card by its key or name ("uni", "H-optimus-0", "hoptimus0"), or make one for `timm:<architecture>`."""
    if name.lower().startswith(TIMM_PREFIX):
        from tapfm.encoders.timm_card import card_for_timm  # needs timm, and so torch

        return card_for_timm(name[len(TIMM_PREFIX) :])
    cards = encoder_cards()
    wanted = _letters_and_digits(name)
    for card in cards.values():
        if wanted in (_letters_and_digits(card.key), _letters_and_digits(card.name)):
            return card
    for other, reason in _NOT_OFFERED.items():
        if wanted == _letters_and_digits(other):
            raise UnsupportedEncoderError(
                f"Encoder '{name}' is known but not offered: {reason}.", hint="Offered: tapfm encoders"
            )
    raise UnknownNameError.of("encoder", name, cards, see="tapfm encoders (any timm ViT: timm:<architecture>)")

"""The catalogue of encoders, read from `cards.toml`. Does not import torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources

from tapfm.encoders.card import TIMM_PREFIX, EncoderCard, card_from_table
from tapfm.errors import UnknownNameError, UnsupportedEncoderError

# Known encoders that are not supported, and the reason.
_UNSUPPORTED = {
    "conch": "its tile feature is an attention pool over the tokens, not the CLS token",
    "conch-v1.5": "its tile feature is an attention pool over the tokens, not the CLS token",
    "musk": "it is a BEiT3 with text and vision experts, and loading its checkpoint could not be verified",
    "plip": "its tile feature is a projection of the CLS token into a space shared with text",
    "quiltnet": "its tile feature is a projection of the CLS token into a space shared with text",
    "keep": "its tile feature is a projection of the CLS token into a space shared with text",
    "genbio-pathfm": "its tile feature joins three CLS tokens, one per colour channel",
    "rudolfv-2": "its architecture is published only as remote code, so its checkpoint keys are unknown",
    "phaet": "its pixel normalisation is not published",
    "mascaret": "its pixel normalisation is not published",
    "prost40m": "its architecture and pixel normalisation are not published",
}


@cache
def load_encoder_cards() -> Mapping[str, EncoderCard]:
    """Return all cards by key, in the order of the file."""
    text = resources.files("tapfm.encoders").joinpath("cards.toml").read_text("utf-8")
    return {key: card_from_table(key, table) for key, table in tomllib.loads(text).items()}


def _normalise_name(name: str) -> str:
    """Return the name in lower case, with only letters, digits and "+"; users spell the rest differently."""
    return "".join(character for character in name.lower() if character.isalnum() or character == "+")


def find_encoder_card(name: str) -> EncoderCard:
    """Return the card with this key or name ("uni", "H-optimus-0", "hoptimus0").

    For `timm:<architecture>` a card is built from the configuration in timm.
    """
    if name.lower().startswith(TIMM_PREFIX):
        from tapfm.encoders.timm_card import build_timm_card  # needs timm, and so torch

        return build_timm_card(name[len(TIMM_PREFIX) :])
    cards = load_encoder_cards()
    wanted = _normalise_name(name)
    for card in cards.values():
        if wanted in (_normalise_name(card.key), _normalise_name(card.name)):
            return card
    for other, reason in _UNSUPPORTED.items():
        if wanted == _normalise_name(other):
            raise UnsupportedEncoderError(
                f"Encoder '{name}' is not supported: {reason}.", hint="List the supported encoders: tapfm encoders"
            )
    raise UnknownNameError.with_suggestions(
        "encoder", name, cards, see="the names listed by `tapfm encoders`, and timm:<architecture>"
    )

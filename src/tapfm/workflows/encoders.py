"""`tapfm encoders`: list the supported encoders, and check that one can be loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.messages import format_command
from tapfm.runtime.options import Argument, Option, command_function, options

if TYPE_CHECKING:
    from tapfm.encoders.card import EncoderCard
    from tapfm.encoders.weights import Provenance


@options
class EncodersOptions:
    """Options of `tapfm encoders`."""

    name: Annotated[
        str | None,
        Argument("Show all details of this encoder: a name from the list, or timm:<architecture>."),
    ] = None
    _: KW_ONLY
    check_weights: Annotated[
        bool,
        Option("Load the weights (downloaded if necessary), verify them and encode one tile.", flag="--check"),
    ] = False
    weights: Annotated[
        Path | None,
        Option(
            "With --check: weights file, or a folder with the files of a Hugging Face repository.",
            metavar="PATH",
            show_default="from the tapfm package or the Hugging Face cache, else downloaded",
        ),
    ] = None

    def check(self) -> None:
        """Raise InputError for options that need another option."""
        if self.name is None and (self.check_weights or self.weights is not None):
            raise InputError(
                "--check and --weights need the name of an encoder.", hint="For example: tapfm encoders uni --check"
            )
        if self.weights is not None and not self.check_weights:
            raise InputError(
                "--weights is only used with --check.",
                hint=f"Add --check: {format_command('encoders', str(self.name), '--check', '--weights', self.weights)}",
            )


@dataclass(frozen=True)
class EncoderCheck:
    """Result of loading an encoder and encoding one grey tile."""

    provenance: Provenance
    parameters: int
    feature_size: int
    feature_norm: float
    raw_attention: float


@dataclass(frozen=True)
class EncoderList:
    """Cards of all encoders or of one, and with --check the result of loading it."""

    cards: Sequence[EncoderCard]
    check: EncoderCheck | None = None


@command_function(EncodersOptions)
def encoders(options: EncodersOptions, console: Console) -> EncoderList:
    """Return the cards of all encoders, or of one. With --check, also load that encoder and encode a tile."""
    from tapfm.encoders.catalog import find_encoder_card, load_encoder_cards

    if options.name is None:
        return EncoderList(list(load_encoder_cards().values()))
    card = find_encoder_card(options.name)
    if not options.check_weights:
        return EncoderList([card])
    console.print(f"loading {card.name} ...", markup=False)
    return EncoderList([card], _check_encoder(card, options.weights))


def _check_encoder(card: EncoderCard, weights: Path | None) -> EncoderCheck:
    import torch

    from tapfm.encoders.weights import load_encoder

    encoder, _, provenance = load_encoder(card, weights=weights)
    grey = torch.full((1, 3, encoder.tile_px, encoder.tile_px), 200, dtype=torch.uint8)
    with torch.no_grad():
        encoded = encoder.eval()(grey)
    return EncoderCheck(
        provenance,
        parameters=sum(each.numel() for each in encoder.parameters()),
        feature_size=encoded.z_KD.shape[1],
        feature_norm=float(encoded.z_KD.norm()),
        raw_attention=float(encoded.r_K),
    )

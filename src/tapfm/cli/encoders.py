"""`tapfm encoders`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tapfm.cli.command import command
from tapfm.cli.console import print_json, stderr_console, stdout_console
from tapfm.workflows import encoders as workflow

if TYPE_CHECKING:
    from tapfm.encoders.card import EncoderCard

_NARROW = 100  # columns
_GAP = 2
_FEATURES = {"cls": "CLS", "cls+mean": "CLS + mean"}
_ACCESS = {"none": "open", "terms": "terms", "manual": "ask"}
_GATES = {"none": "open", "terms": "accept terms", "manual": "ask, then wait"}
_PUBLISHED = {
    True: "the published file",
    False: "NOT the published file: weights of your own",
    None: "no published digest",
}


@command(workflow.EncodersOptions)
def encoders(
    options: workflow.EncodersOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the foundation models that tapfm can adapt, or show one.

    \b
    tapfm encoders               the catalogue
    tapfm encoders uni           one card: architecture, pixels, licence, weights
    tapfm encoders uni --check   can it be loaded here? (if gated: how to get access)
    tapfm encoders uni --check --weights pytorch_model.bin
    """
    found = workflow.encoders.run(options, stderr_console())
    card = found.cards[0]
    if found.check is not None:
        rows = _check_rows(found.check)
        if as_json:
            print_json({"key": card.key, **rows})
        else:
            _print_rows(rows, stdout_console(), title=f"{card.key} loads")
    elif options.name is not None:
        if as_json:
            print_json(asdict(card))
        else:
            _print_rows(_card_rows(card), stdout_console(), title=card.key)
    elif as_json:
        print_json([asdict(each) for each in found.cards])
    else:
        _print_catalogue(found.cards, stdout_console())


def _print_catalogue(cards: Sequence[EncoderCard], console: Console) -> None:
    """Print all encoders, one row each."""
    columns: dict[str, list[str]] = {
        "encoder": [card.key for card in cards],
        "params": [f"{card.parameters / 1e6:,.1f}M" for card in cards],
        "GFLOP": ["-" if card.gflops is None else f"{card.gflops:,.1f}" for card in cards],
        "prefix": [str(card.prefix_tokens) for card in cards],
        "feature": [f"{card.feature_size} {card.feature}" for card in cards],
        "tile": [f"{card.tile_px}{_mpp_range(card)}" for card in cards],
        "in": [card.precision for card in cards],
        "access": ["packaged" if card.packaged else _ACCESS[card.gate] for card in cards],
        "licence": [card.licence for card in cards],
    }
    if console.width < _NARROW:
        del columns["prefix"], columns["in"]  # one card in full still shows them
    widths = {heading: max(map(len, [heading, *cells])) for heading, cells in columns.items()}
    room = console.width - sum(width + _GAP for heading, width in widths.items() if heading != "licence")
    widths["licence"] = max(len("licence"), min(room, widths["licence"]))  # only the licence is cut short
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for heading, width in widths.items():
        right = heading in ("params", "GFLOP", "prefix")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True, width=width)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    prefix = "prefix: CLS + registers. " if "prefix" in columns else ""
    console.print(
        f"\n{len(cards)} encoders. GFLOP: forward, per tile. {prefix}tile: px at um/px. "
        "access: open, accept terms, or ask and wait; packaged comes with tapfm.\n"
        "One in full: tapfm encoders NAME. Any other timm ViT: timm:<architecture>"
    )


def _card_rows(card: EncoderCard) -> dict[str, str]:
    """Return all that is known of one encoder."""
    positions = (
        "as trained"
        if card.position_px == card.tile_px
        else f"table for {card.position_px} px, resampled to {card.tile_px} px when loaded, as {card.resampling} does"
    )
    registers = card.prefix_tokens - 1
    mpp = f" at {' / '.join(f'{each:g}' for each in card.mpp)} um/px" if card.mpp else ", microns per pixel not stated"
    return {
        "name": card.name,
        "architecture": f"timm {card.architecture}",
        "arguments": ", ".join(f"{k}={v!r}" for k, v in card.arguments.items()) or "-",
        "parameters": f"{card.parameters:,}",
        "prefix tokens": f"{card.prefix_tokens} (CLS{f' + {registers} registers' if registers else ''})",
        "feature": f"{_FEATURES[card.feature]}, {card.feature_size} numbers per tile",
        "mean / std": f"{', '.join(map(str, card.mean))} / {', '.join(map(str, card.std))}",
        "tile": f"{card.tile_px} px{mpp}",
        "positions": positions,
        "cost": "-" if card.gflops is None else f"{card.gflops:,.1f} GFLOP per tile, forward",
        "precision": card.precision,
        "licence": card.licence,
        "access": _GATES[card.gate] + (f": {card.page}" if card.gate != "none" else ""),
        "source": _source(card),
        "revision": card.revision or ("-" if card.packaged else "not pinned"),
        "SHA-256": card.sha256 or "not known",
        "notes": card.notes or "-",
    }


def _check_rows(check: workflow.EncoderCheck) -> dict[str, str]:
    provenance = check.provenance
    return {
        "weights": str(provenance.file),
        "SHA-256": f"{provenance.sha256} ({_PUBLISHED[provenance.published]})",
        "positions": provenance.positions,
        "parameters": f"{check.parameters:,}, every one from the file",
        "a grey tile": f"feature of {check.feature_size} numbers, norm {check.feature_norm:.4g}; "
        f"raw attention {check.raw_attention:.6g}",
    }


def _source(card: EncoderCard) -> str:
    if card.packaged:
        return f"comes with tapfm: {card.package_folder / card.file}"
    return f"{card.page} {card.file}" if card.page else f"{card.file}, not on the hub"


def _mpp_range(card: EncoderCard) -> str:
    """Return '@0.5', '@0.25-2', or nothing where it is not stated."""
    return "@" + "-".join(f"{mpp:g}" for mpp in sorted({min(card.mpp), max(card.mpp)})) if card.mpp else ""


def _print_rows(rows: dict[str, str], console: Console, *, title: str) -> None:
    """Print two columns of label and value."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows.items():
        table.add_row(label, value)
    console.print(title, style="bold underline")
    console.print(table)

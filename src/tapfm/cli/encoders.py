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

_NARROW_WIDTH = 100  # characters
_COLUMN_GAP = 2
_FEATURES = {"cls": "CLS", "cls+mean": "CLS + mean"}
_ACCESS = {"none": "open", "terms": "terms", "manual": "request"}
_ACCESS_DETAILS = {"none": "open", "terms": "accept the terms", "manual": "request access and wait for approval"}
_PUBLISHED = {
    True: "matches the published file",
    False: "does NOT match the published file",
    None: "the published SHA-256 is not known",
}


@command(workflow.EncodersOptions)
def encoders(
    options: workflow.EncodersOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the supported encoders (foundation models), or show the details of one.

    With --check, also downloads its weights if necessary, loads them and
    encodes one tile. If you have no access to a gated model, the error message
    says how to get it.

    \b
    Examples:
      tapfm encoders
      tapfm encoders uni           # architecture, licence, source of the weights
      tapfm encoders uni --check   # test that it can be loaded
      tapfm encoders uni --check --weights pytorch_model.bin
    """
    found = workflow.encoders.run(options, stderr_console())
    card = found.cards[0]
    if found.check is not None:
        rows = _check_rows(found.check)
        if as_json:
            print_json({"key": card.key, **rows})
        else:
            _print_rows(rows, stdout_console(), title=f"{card.key} was loaded")
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
    columns: dict[str, list[str]] = {
        "encoder": [card.key for card in cards],
        "params": [f"{card.parameters / 1e6:,.1f}M" for card in cards],
        "GFLOP": ["-" if card.gflops is None else f"{card.gflops:,.1f}" for card in cards],
        "prefix": [str(card.prefix_tokens) for card in cards],
        "feature": [f"{card.feature_size} {card.feature}" for card in cards],
        "tile": [f"{card.tile_px}{_mpp_range(card)}" for card in cards],
        "precision": [card.precision for card in cards],
        "access": ["packaged" if card.packaged else _ACCESS[card.gate] for card in cards],
        "licence": [card.licence for card in cards],
    }
    if console.width < _NARROW_WIDTH:
        del columns["prefix"], columns["precision"]  # `tapfm encoders NAME` shows them
    widths = {heading: max(map(len, [heading, *cells])) for heading, cells in columns.items()}
    available = console.width - sum(width + _COLUMN_GAP for heading, width in widths.items() if heading != "licence")
    widths["licence"] = max(len("licence"), min(available, widths["licence"]))  # only this column is truncated
    table = Table(box=None, pad_edge=False, padding=(0, _COLUMN_GAP, 0, 0), header_style="bold")
    for heading, width in widths.items():
        right = heading in ("params", "GFLOP", "prefix")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True, width=width)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    prefix = "prefix: number of CLS and register tokens. " if "prefix" in columns else ""
    precision = "precision: used by the encoder's authors or users. " if "precision" in columns else ""
    console.print(
        f"\n{len(cards)} encoders. GFLOP: forward pass of one tile. {prefix}tile: pixels @ microns per pixel. "
        f"{precision}access: open, accept terms, request access, or packaged with tapfm.\n"
        "Details of one encoder: tapfm encoders NAME. Other ViTs of timm with a CLS token: timm:<architecture>."
    )


def _card_rows(card: EncoderCard) -> dict[str, str]:
    """Return the details of an encoder, by label."""
    positions = (
        "as trained"
        if card.position_px == card.tile_px
        else f"for {card.position_px} px, resampled to {card.tile_px} px when loaded, as in {card.resampling}"
    )
    registers = card.prefix_tokens - 1
    mpp = (
        f" at {' / '.join(f'{each:g}' for each in card.mpp)} um/px"
        if card.mpp
        else ", microns per pixel not documented"
    )
    return {
        "name": card.name,
        "architecture": f"timm {card.architecture}",
        "arguments": ", ".join(f"{k}={v!r}" for k, v in card.arguments.items()) or "-",
        "parameters": f"{card.parameters:,}",
        "prefix tokens": f"{card.prefix_tokens} (CLS{f' + {registers} registers' if registers else ''})",
        "feature": f"{_FEATURES[card.feature]}, size {card.feature_size}",
        "mean / std": f"{', '.join(map(str, card.mean))} / {', '.join(map(str, card.std))}",
        "tile": f"{card.tile_px} px{mpp}",
        "position embedding": positions,
        "cost": "-" if card.gflops is None else f"{card.gflops:,.1f} GFLOP for the forward pass of a tile",
        "precision": f"{card.precision}, used by its authors or users",
        "licence": card.licence,
        "access": _ACCESS_DETAILS[card.gate] + (f": {card.page}" if card.gate != "none" else ""),
        "source": _describe_source(card),
        "revision": card.revision or ("-" if card.packaged else "not pinned"),
        "SHA-256": card.sha256 or "not known",
        "notes": card.notes or "-",
    }


def _check_rows(check: workflow.EncoderCheck) -> dict[str, str]:
    provenance = check.provenance
    return {
        "weights": str(provenance.file),
        "SHA-256": f"{provenance.sha256} ({_PUBLISHED[provenance.published]})",
        "position embedding": provenance.position_embedding,
        "parameters": f"{check.parameters:,}, all loaded from the file",
        "grey test tile": f"feature of size {check.feature_size} with norm {check.feature_norm:.4g}; "
        f"raw attention {check.raw_attention:.6g}",
    }


def _describe_source(card: EncoderCard) -> str:
    if card.packaged:
        return f"packaged with tapfm: {card.package_folder / card.file}"
    return f"{card.page} {card.file}" if card.page else f"{card.file}, not on the Hugging Face Hub"


def _mpp_range(card: EncoderCard) -> str:
    """Return '@0.5' or '@0.25-2', or an empty string if it is not documented."""
    return "@" + "-".join(f"{mpp:g}" for mpp in sorted({min(card.mpp), max(card.mpp)})) if card.mpp else ""


def _print_rows(rows: dict[str, str], console: Console, *, title: str) -> None:
    """Print labels and values in two columns."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows.items():
        table.add_row(label, value)
    console.print(title, style="bold underline")
    console.print(table)

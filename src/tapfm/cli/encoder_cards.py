"""The catalogue on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tapfm.encoders.card import EncoderCard

NARROW = 100  # columns
FEATURES = {"cls": "CLS", "cls+mean": "CLS + mean"}
GATES = {"none": "open", "terms": "accept terms", "manual": "ask, then wait"}


def show_table(cards: Iterable[EncoderCard], console: Console, *, as_json: bool) -> None:
    """The whole catalogue, a row each."""
    cards = list(cards)
    if as_json:
        print(json.dumps([asdict(card) for card in cards], indent=1))
        return
    columns: dict[str, list[str]] = {
        "encoder": [card.key for card in cards],
        "params": [f"{card.parameters / 1e6:,.1f}M" for card in cards],
        "GFLOP": ["-" if card.gflops is None else f"{card.gflops:,.1f}" for card in cards],
        "prefix": [str(card.prefix_tokens) for card in cards],
        "feature": [f"{card.feature_size} {card.feature}" for card in cards],
        "tile": [f"{card.tile_px}{range_of_mpp(card)}" for card in cards],
        "in": [card.precision for card in cards],
        "access": [access_of(card) for card in cards],
        "licence": [card.licence for card in cards],
    }
    if console.width < NARROW:
        del columns["prefix"], columns["in"]  # one card in full still shows them
    widths = {heading: max(map(len, [heading, *cells])) for heading, cells in columns.items()}
    gap = 2
    room = console.width - sum(width + gap for heading, width in widths.items() if heading != "licence")
    widths["licence"] = max(len("licence"), min(room, widths["licence"]))  # only the licence is cut short
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
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


def show_card(card: EncoderCard, console: Console, *, as_json: bool) -> None:
    """One encoder in full."""
    if as_json:
        print(json.dumps(asdict(card), indent=1))
        return
    positions = (
        "as trained"
        if card.position_px == card.tile_px
        else f"table for {card.position_px} px, resampled to {card.tile_px} px when loaded, as {card.resampling} does"
    )
    registers = card.prefix_tokens - 1
    rows = {
        "name": card.name,
        "architecture": f"timm {card.architecture}",
        "arguments": ", ".join(f"{k}={v!r}" for k, v in card.arguments.items()) or "-",
        "parameters": f"{card.parameters:,}",
        "prefix tokens": f"{card.prefix_tokens} (CLS{f' + {registers} registers' if registers else ''})",
        "feature": f"{FEATURES[card.feature]}, {card.feature_size} numbers per tile",
        "mean / std": f"{', '.join(map(str, card.mean))} / {', '.join(map(str, card.std))}",
        "tile": f"{card.tile_px} px{at_mpp(card) or ', microns per pixel not stated'}",
        "positions": positions,
        "cost": "-" if card.gflops is None else f"{card.gflops:,.1f} GFLOP per tile, forward",
        "precision": card.precision,
        "licence": card.licence,
        "access": GATES[card.gate] + (f": {card.page}" if card.gate != "none" else ""),
        "source": source_of(card),
        "revision": card.revision or ("-" if card.packaged else "not pinned"),
        "SHA-256": card.sha256 or "not known",
        "notes": card.notes or "-",
    }
    print_rows(rows, console, title=card.key)


def check_encoder(card: EncoderCard, weights: Path | None, console: Console, *, as_json: bool) -> None:
    """Load the encoder for real and send a tile through it."""
    import torch

    from tapfm.encoders.weights import load_encoder

    Console(stderr=True).print(f"loading {card.name} ...")
    encoder, _, provenance = load_encoder(card, weights=weights)
    grey = torch.full((1, 3, encoder.tile_px, encoder.tile_px), 200, dtype=torch.uint8)
    with torch.no_grad():
        encoded = encoder.eval()(grey)
    verdict = {
        True: "the published file",
        False: "NOT the published file: weights of your own",
        None: "no published digest",
    }
    rows = {
        "weights": str(provenance.file),
        "SHA-256": f"{provenance.sha256} ({verdict[provenance.published]})",
        "positions": provenance.positions,
        "parameters": f"{sum(p.numel() for p in encoder.parameters()):,}, every one from the file",
        "a grey tile": f"feature of {encoded.z_KD.shape[1]} numbers, norm {float(encoded.z_KD.norm()):.4g}; "
        f"raw attention {float(encoded.r_K):.6g}",
    }
    if as_json:
        print(json.dumps({"key": card.key, **rows}, indent=1))
    else:
        print_rows(rows, console, title=f"{card.key} loads")


def access_of(card: EncoderCard) -> str:
    """Say in a word how its weights are got."""
    return "packaged" if card.packaged else {"none": "open", "terms": "terms", "manual": "ask"}[card.gate]


def source_of(card: EncoderCard) -> str:
    """Say where its weights come from."""
    if card.packaged:
        return f"comes with tapfm: {card.package_folder / card.file}"
    return f"{card.page} {card.file}" if card.page else f"{card.file}, not on the hub"


def print_rows(rows: dict[str, str], console: Console, *, title: str) -> None:
    """Two columns of label and value."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows.items():
        table.add_row(label, value)
    console.print(title, style="bold underline")
    console.print(table)


def at_mpp(card: EncoderCard) -> str:
    """' at 0.5 um/px', or nothing where it is not stated."""
    return f" at {' / '.join(f'{mpp:g}' for mpp in card.mpp)} um/px" if card.mpp else ""


def range_of_mpp(card: EncoderCard) -> str:
    """'@0.5', '@0.25-2', or nothing where it is not stated."""
    return "@" + "-".join(f"{mpp:g}" for mpp in sorted({min(card.mpp), max(card.mpp)})) if card.mpp else ""

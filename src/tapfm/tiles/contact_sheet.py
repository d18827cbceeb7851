"""index.html: the overlays of all slides on one page that needs nothing but the folder it is in."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from urllib.parse import quote

from tapfm.tiles.records import TileRecord


def contact_sheet(entries: Sequence[TileRecord]) -> str:
    """Write the page: what failed and why, then every slide."""
    failed = [entry for entry in entries if entry.status == "failed"]
    tiled = [entry for entry in entries if entry.status == "ok"]
    count = f"{len(tiled):,} of {len(entries):,} slides tiled, {sum(entry.tiles for entry in tiled):,} tiles"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
            f"<title>Tiles: {count}</title><style>{_static('contact_sheet.css')}</style></head><body>",
            f"<h1>Tiles</h1><p>{count}. Green outline: tissue; green squares: tiles; filled squares: left out.</p>",
            *_failures_table(failed),
            '<input type="search" placeholder="filter by name, warning, scale" aria-label="filter">',
            '<div class="sheet">',
            *map(_figure, [*failed, *tiled]),
            f"</div><script>{_static('contact_sheet.js')}</script></body></html>",
        ]
    )


def _static(name: str) -> str:
    """Read a part of the page that is kept beside this module."""
    return (files("tapfm.tiles") / "static" / name).read_text(encoding="utf-8")


def _failures_table(failed: Sequence[TileRecord]) -> list[str]:
    """List what failed, or nothing."""
    if not failed:
        return []
    rows = (
        f"<tr><td>{html.escape(entry.slide_id)}</td><td>{html.escape(entry.reason)}</td>"
        f"<td>{html.escape(entry.what_to_do)}</td></tr>"
        for entry in failed
    )
    return [
        f'<h2 class="bad">{len(failed):,} failed</h2>',
        "<table><tr><th>slide</th><th>reason</th><th>what to do</th></tr>",
        *rows,
        "</table><h2>Slides</h2>",
    ]


def _figure(entry: TileRecord) -> str:
    """Show one slide; a failed one may have no picture."""
    name = html.escape(entry.slide_id)
    picture = f"overlays/{quote(entry.slide_id)}.png"
    image = (
        f'<a href="{picture}"><img loading="lazy" src="{picture}" alt="{name}" '
        "onerror=\"this.replaceWith('no picture')\"></a>"
    )
    if entry.status == "failed":
        caption = f'<span class="bad">failed</span><small>{html.escape(entry.reason)}</small>'
    else:
        caption = f"<small>{html.escape(_facts_line(entry))}</small>"
        if entry.warnings:
            caption += f'<small class="warning">{html.escape(entry.warnings)}</small>'
    return f"<figure>{image}<figcaption><strong>{name}</strong> {caption}</figcaption></figure>"


def _facts_line(entry: TileRecord) -> str:
    """Say amounts and scale in a line."""
    parts = [
        f"{entry.tiles:,} tiles",
        f"{entry.tissue_mm2 or 0:.2f} mm² of tissue",
        f"{entry.mpp:.4g} µm/px ({entry.mpp_source})",
    ]
    parts += [
        f"{count:,} {what}" for count, what in ((entry.removed_pen, "pen"), (entry.removed_blur, "blurred")) if count
    ]
    return " · ".join(parts)

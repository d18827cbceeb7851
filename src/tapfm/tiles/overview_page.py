"""index.html of a tile folder: a page that shows the images in `overlays/`, with its CSS and JavaScript inline."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from urllib.parse import quote

from tapfm.tiles.records import TilingRecord


def build_overview_page(entries: Sequence[TilingRecord]) -> str:
    """Return the page as HTML: failed slides with reasons, then tiled slides. Slides not tiled yet are omitted."""
    failed = [entry for entry in entries if entry.status == "failed"]
    tiled = [entry for entry in entries if entry.status == "ok"]
    count = f"{len(tiled):,} of {len(entries):,} slides tiled, {sum(entry.tiles for entry in tiled):,} tiles"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
            f"<title>Tiles: {count}</title><style>{_read_static('overview_page.css')}</style></head><body>",
            f"<h1>Tiles</h1><p>{count}. Green outline: tissue. Green squares: tiles. "
            "Filled squares: removed tiles, with the reason in the legend of the image.</p>",
            *_format_failures_table(failed),
            '<input type="search" placeholder="filter by name, warning, scale" aria-label="filter">',
            '<div class="sheet">',
            *map(_format_figure, [*failed, *tiled]),
            f"</div><script>{_read_static('overview_page.js')}</script></body></html>",
        ]
    )


def _read_static(name: str) -> str:
    return (files("tapfm.tiles") / "static" / name).read_text(encoding="utf-8")


def _format_failures_table(failed: Sequence[TilingRecord]) -> list[str]:
    """Return a table of the failed slides; empty if there are none."""
    if not failed:
        return []
    rows = (
        f"<tr><td>{html.escape(entry.slide_id)}</td><td>{html.escape(entry.reason)}</td>"
        f"<td>{html.escape(entry.hint)}</td></tr>"
        for entry in failed
    )
    return [
        f'<h2 class="bad">{len(failed):,} failed</h2>',
        "<table><tr><th>slide</th><th>reason</th><th>hint</th></tr>",
        *rows,
        "</table><h2>Slides</h2>",
    ]


def _format_figure(entry: TilingRecord) -> str:
    """Return the figure of one slide; a failed slide may have no overlay."""
    name = html.escape(entry.slide_id)
    overlay = f"overlays/{quote(entry.slide_id)}.png"
    image = (
        f'<a href="{overlay}"><img loading="lazy" src="{overlay}" alt="{name}" '
        "onerror=\"this.replaceWith('no image')\"></a>"
    )
    if entry.status == "failed":
        caption = f'<span class="bad">failed</span><small>{html.escape(entry.reason)}</small>'
    else:
        caption = f"<small>{html.escape(_format_statistics(entry))}</small>"
        if entry.warnings:
            caption += f'<small class="warning">{html.escape(entry.warnings)}</small>'
    return f"<figure>{image}<figcaption><strong>{name}</strong> {caption}</figcaption></figure>"


def _format_statistics(entry: TilingRecord) -> str:
    parts = [
        f"{entry.tiles:,} tiles",
        f"{entry.tissue_mm2 or 0:.2f} mm² of tissue",
        f"{entry.mpp:.4g} µm/px (from {entry.mpp_source})",
    ]
    parts += [
        f"{count:,} {name}"
        for count, name in (
            (entry.tiles_padded, "tiles padded with white"),
            (entry.removed_pen, "removed (pen)"),
            (entry.removed_blur, "removed (out of focus)"),
            (entry.removed_edge, "removed (past the edge)"),
        )
        if count
    ]
    return " · ".join(parts)

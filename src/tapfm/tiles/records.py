"""The record of a tiled slide: a row of summary.csv."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TilingRecord:
    """The result of tiling one slide."""

    slide_id: str
    status: str  # ok, failed, or "not tiled" (excluded by --only, without results)
    reason: str = ""
    mpp: float | None = None
    mpp_source: str = ""
    tissue: str = ""  # detection method, or "annotation" if --tissue-mask was used
    achieved_mpp: float | None = None
    tiles: int = 0  # padded tiles included
    tiles_padded: int | None = None  # None if an older version tiled the slide, as for removed_edge
    tissue_mm2: float | None = None
    removed_background: int | None = None
    removed_padding: int | None = None
    removed_pen: int | None = None
    removed_blur: int | None = None
    removed_unreadable: int | None = None
    removed_edge: int | None = None
    removed_edge_mm2: float | None = None  # tissue in these tiles that is in no other tile
    warnings: str = ""
    seconds: float | None = None
    hint: str = ""

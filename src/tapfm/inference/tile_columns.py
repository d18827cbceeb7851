"""Names of the columns with one value per tile: `attention`, `weight`, `score.FGFR3`, `contribution.FGFR3`, ..."""

from __future__ import annotations

from typing import Literal

TileColumn = Literal["attention", "weight", "contribution", "score"]


def column_name(kind: TileColumn, target: str | None = None) -> str:
    """Return the name of a column; columns shared by all targets have no target."""
    return kind if target is None else f"{kind}.{target}"

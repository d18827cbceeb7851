"""tiles.parquet: position and values of each tile of a slide."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapfm.errors import InputError
from tapfm.prediction.layers import Values
from tapfm.runtime.files import write_atomically
from tapfm.tiles.grid import Positions

TILES_PARQUET = "tiles.parquet"


@dataclass(frozen=True)
class TileTable:
    """Tiles in the order of the slide's tile set: level-0 positions of their top left corners, and columns of values.

    Columns are `attention` (raw attention of the encoder), and `weight`, `contribution.TARGET` and `score` if the
    aggregator has them; for an ensemble, if all members have them. If values differ between targets, the columns are
    `weight.TARGET` and `score.TARGET`.
    """

    positions: Positions  # (K, 2)
    values: Mapping[str, Values]
    padded: NDArray[np.bool_] | None = None  # (K,), which tiles extend past the edge; None without --edge-tiles pad

    def __len__(self) -> int:
        return len(self.positions)


def write_tile_table(path: Path, table: TileTable) -> None:
    """Write tiles.parquet. The output is deterministic."""
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, NDArray[Any]] = {"x": table.positions[:, 0], "y": table.positions[:, 1]}
    if table.padded is not None:
        columns["padded"] = table.padded
    columns |= table.values
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), buffer, compression="zstd")
    write_atomically(path, buffer.getvalue())


def read_tile_table(path: Path) -> TileTable:
    import pyarrow
    from pyarrow import parquet

    try:
        with path.open("rb") as file:
            table = parquet.read_table(file)
        columns = {name: table[name].to_numpy() for name in table.column_names}
        padded = columns.pop("padded", None)
        positions = np.stack([columns.pop("x"), columns.pop("y")], axis=1).astype(np.int64)
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise InputError(
            f"{path} cannot be read as a tile table ({error}).",
            hint="Delete this file if it exists, then run the same tapfm predict command with --resume.",
        ) from error
    return TileTable(positions, {name: each.astype(np.float64) for name, each in columns.items()}, padded)

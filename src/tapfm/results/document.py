"""Sections of paragraphs, tables and figures, and their JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tapfm.errors import InputError
from tapfm.results.figure import Figure
from tapfm.results.table import Table
from tapfm.runtime.files import write_atomically


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of plain text; warnings stand out."""

    text: str
    warning: bool = False
    kind: Literal["paragraph"] = "paragraph"


Block = Paragraph | Table | Figure


@dataclass(frozen=True)
class Section:
    """A title and what stands below it."""

    title: str
    blocks: Sequence[Block]


def write_sections(path: Path, sections: Sequence[Section]) -> None:
    """Write sections as JSON; numbers that are not finite are missing there."""
    written = _without_non_finite([asdict(each) for each in sections])
    write_atomically(path, f"{json.dumps(written, indent=1, allow_nan=False)}\n".encode())


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_non_finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_sections(path: Path, *, hint: str) -> list[Section]:
    """Read sections that `write_sections` wrote. `hint` says how to write a damaged file again."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(list[Section]).validate_json(path.read_bytes())
    except ValidationError as error:
        raise InputError(f"{path} is damaged ({error.errors()[0]['msg']}).", hint=hint) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}).", hint=hint) from error

"""Sections of paragraphs, tables and figures, and their JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

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
    """Write sections as JSON."""
    write_atomically(path, f"{json.dumps([asdict(each) for each in sections], indent=1, allow_nan=False)}\n".encode())


def read_sections(path: Path) -> list[Section]:
    """Read sections that `write_sections` wrote."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(list[Section]).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise InputError(f"{path} cannot be read ({error}).", hint="Write the results again.") from error

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
    """A paragraph. Its text may contain Markdown if it is only for Markdown files. Warnings are highlighted."""

    text: str
    warning: bool = False
    kind: Literal["paragraph"] = "paragraph"


Block = Paragraph | Table | Figure


@dataclass(frozen=True)
class Section:
    """A title and the blocks below it."""

    title: str
    blocks: Sequence[Block]


def write_sections_json(path: Path, sections: Sequence[Section]) -> None:
    """Write sections as JSON. Infinite values and NaN are written as null."""
    content = _replace_non_finite([asdict(each) for each in sections])
    write_atomically(path, f"{json.dumps(content, indent=1, allow_nan=False)}\n".encode())


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_non_finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_sections_json(path: Path, *, hint: str) -> list[Section]:
    """Read a file of `write_sections_json`. `hint` is shown with the error if the file is damaged."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(list[Section]).validate_json(path.read_bytes())
    except ValidationError as error:
        raise InputError(f"{path} is damaged ({error.errors()[0]['msg']}).", hint=hint) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}).", hint=hint) from error

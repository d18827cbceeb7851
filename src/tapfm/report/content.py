"""What a report is made of besides tables and figures. Everything is plain text; `page.py` escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tapfm.results.document import Paragraph
from tapfm.results.figure import Figure
from tapfm.results.table import Table


@dataclass(frozen=True)
class Code:
    """A file as it is."""

    kind: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Collapsible:
    """Blocks that a reader may open and shut."""

    kind: ClassVar[str] = "fold"
    title: str
    blocks: Sequence[Block]
    summary: str = ""
    open: bool = False


@dataclass(frozen=True)
class SlideLine:
    """What is said of one target of one slide."""

    slide_id: str
    patient_id: str
    where: str  # test, validation, external.csv, ...
    target: str
    probability: float
    threshold: float | None
    call: str  # as words; empty: none
    label: str
    outcome: str  # of the call: right, or how it is wrong
    tiles: int
    model: str = ""

    @property
    def wrong(self) -> bool:
        """Whether the call is wrong."""
        return self.outcome not in ("", "correct")


@dataclass(frozen=True)
class SlidesBlock:
    """The table of slides, to sort and to filter."""

    kind: ClassVar[str] = "slides"
    few: ClassVar[int] = 300  # lines on the screen at first: thousands would take seconds to lay out
    lines: Sequence[SlideLine]

    @property
    def places(self) -> list[str]:
        """List where slides are from."""
        return list(dict.fromkeys(line.where for line in self.lines))

    @property
    def targets(self) -> list[str]:
        """List the targets."""
        return list(dict.fromkeys(line.target for line in self.lines))

    @property
    def models(self) -> list[str]:
        """List the models."""
        return list(dict.fromkeys(line.model for line in self.lines))


@dataclass(frozen=True)
class Picture:
    """A picture in the page itself."""

    data: str  # a data: URI
    width_px: int
    height_px: int
    said: str  # for those who do not see it


@dataclass(frozen=True)
class SlideHeatmaps:
    """A slide as it is, and with what the model saw in it."""

    slide_id: str
    target: str
    outcome: str
    facts: Sequence[str]
    pictures: Sequence[Picture]
    why: str = ""  # there are none
    wrong: bool = False  # the call


@dataclass(frozen=True)
class ColourBar:
    """What colours mean."""

    colours: tuple[str, ...]  # from low to high, as #rrggbb
    low: str
    high: str
    said: str


@dataclass(frozen=True)
class HeatmapGallery:
    """Slides with their maps."""

    kind: ClassVar[str] = "heats"
    heats: Sequence[SlideHeatmaps]
    bars: Sequence[ColourBar]
    title: str = ""


@dataclass(frozen=True)
class TilePicture:
    """One tile, and what it did."""

    picture: Picture
    slide_id: str
    value: str


@dataclass(frozen=True)
class TileGallery:
    """Tiles that said most, of one target and one side."""

    kind: ClassVar[str] = "gallery"
    title: str
    tiles: Sequence[TilePicture]
    note: str = ""


Block = Table | Figure | Paragraph | Code | Collapsible | SlidesBlock | HeatmapGallery | TileGallery


@dataclass(frozen=True)
class PageSection:
    """A part of the page."""

    title: str
    blocks: Sequence[Block]
    intro: str = ""


@dataclass(frozen=True)
class Page:
    """All of it."""

    kicker: str  # what is reported
    title: str
    summary: Sequence[str]
    headline: Table | None
    warnings: Sequence[str]
    sections: Sequence[PageSection]
    made: str  # when, and by which version

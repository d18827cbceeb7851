"""What a report is made of: sections of blocks. Everything is plain text here; `page.py` escapes it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from markupsafe import Markup

Tone = Literal["quiet", "warning"]
RankMark = Literal["", "best", "second"]  # of a number in its column
_SHORT = 6  # letters of a percentage


@dataclass(frozen=True)
class Cell:
    """What stands in a table: a text, what is smaller behind it (an interval), and why something is missing."""

    text: str
    detail: str = ""
    why: str = ""
    mark: RankMark = ""
    picture: Markup = field(default_factory=Markup)  # an SVG of ours, in front of the text


@dataclass(frozen=True)
class Row:
    """A line of a table; or, with a heading and no cells, a line above some of them."""

    cells: Sequence[Cell] = ()
    heading: str = ""


@dataclass(frozen=True)
class Column:
    """What stands above; words are set from the left, numbers from the right."""

    title: str
    words: bool = False
    picture: Markup = field(default_factory=Markup)


@dataclass(frozen=True)
class Table:
    """A table; its first column names the lines."""

    kind: ClassVar[str] = "table"
    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    notes: Sequence[str] = ()

    @property
    def reasons(self) -> list[str]:
        """List, once each, why things are missing; cells name them by number."""
        return list(dict.fromkeys(cell.why for row in self.rows for cell in row.cells if cell.why))

    @property
    def has_head(self) -> bool:
        """Say whether anything stands above the columns."""
        return any(column.title or column.picture for column in self.columns)

    @property
    def room(self) -> list[str]:
        """Say how much room each column leaves for details, which then stand below each other."""
        longest = [
            max((len(row.cells[place].detail) for row in self.rows if row.cells and row.cells[place].text), default=0)
            for place in range(len(self.columns))
        ]
        return [
            "" if column.words or not length else "room short" if length <= _SHORT else "room"
            for column, length in zip(self.columns, longest, strict=True)
        ]


@dataclass(frozen=True)
class LegendEntry:
    """A line of a chart's legend: the class that its mark has in the style sheet, and what it is."""

    style: str
    name: str


@dataclass(frozen=True)
class Figure:
    """A chart, or why there is none."""

    title: str
    svg: Markup = field(default_factory=Markup)
    keys: Sequence[LegendEntry] = ()
    caption: str = ""
    why: str = ""


@dataclass(frozen=True)
class Figures:
    """Charts side by side."""

    kind: ClassVar[str] = "figures"
    figures: Sequence[Figure]
    title: str = ""


@dataclass(frozen=True)
class Note:
    """A paragraph; of study.md it may be one with **bold** and `code`."""

    kind: ClassVar[str] = "note"
    text: str | Markup
    tone: Tone = "quiet"


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
    label: Hashable
    tiles: int
    model: str = ""

    @property
    def call(self) -> int | None:
        """Say 1 at or above the threshold."""
        return None if self.threshold is None else int(self.probability >= self.threshold)

    @property
    def outcome(self) -> str:
        """Say whether the call is right; nothing where that is not known."""
        if self.call is None or self.label is None:
            return ""
        if self.call == self.label:
            return "right"
        return "false positive" if self.call else "false negative"


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


Block = Table | Figures | Note | Code | Collapsible | SlidesBlock | HeatmapGallery | TileGallery


@dataclass(frozen=True)
class Section:
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
    sections: Sequence[Section]
    made: str  # when, and by which version

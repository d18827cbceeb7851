"""Content of a report as data, in addition to tables and figures. All texts are plain; `html_page.py` escapes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tapfm.results.document import Paragraph
from tapfm.results.figure import Figure
from tapfm.results.table import Table


@dataclass(frozen=True)
class Code:
    """The text of a file, in monospaced type."""

    kind: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Collapsible:
    """Blocks that the reader can expand and collapse."""

    kind: ClassVar[str] = "collapsible"
    title: str
    blocks: Sequence[Block]
    summary: str = ""  # shown after the title
    open: bool = False


@dataclass(frozen=True)
class PredictionRow:
    """The prediction for one target of one slide."""

    slide_id: str
    patient_id: str
    slide_set: str  # test, validation, external.csv, ...
    target: str
    probability: float
    threshold: float | None
    call: str  # empty without a threshold
    label: str  # empty if unknown
    outcome: str  # correct, false positive, false negative; empty if the call or the label is missing
    tiles: int
    model: str = ""
    warning: str = ""  # why the prediction is unreliable

    @property
    def is_wrong(self) -> bool:
        """Whether the call differs from the label."""
        return self.outcome not in ("", "correct")


@dataclass(frozen=True)
class PredictionTable:
    """The table of predictions, which the reader can sort and filter."""

    kind: ClassVar[str] = "predictions"
    rows_shown: ClassVar[int] = 300  # initially; a browser needs seconds to render thousands of rows
    rows: Sequence[PredictionRow]

    @property
    def slide_sets(self) -> list[str]:
        return list(dict.fromkeys(row.slide_set for row in self.rows))

    @property
    def targets(self) -> list[str]:
        return list(dict.fromkeys(row.target for row in self.rows))

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(row.model for row in self.rows))


@dataclass(frozen=True)
class EmbeddedImage:
    """An image stored in the page itself."""

    data_uri: str
    width_px: int
    height_px: int
    alt_text: str


@dataclass(frozen=True)
class SlideHeatmap:
    """A slide without and with its heatmap, or the reason why its images are missing."""

    slide_id: str
    target: str
    outcome: str
    details: Sequence[str]
    images: Sequence[EmbeddedImage]
    missing_reason: str = ""
    is_wrong: bool = False  # the call differs from the label
    warning: str = ""  # why the prediction is unreliable


@dataclass(frozen=True)
class ColourBar:
    """Legend of the colours of heatmaps."""

    colours: tuple[str, ...]  # from low to high, as #rrggbb
    low_label: str
    high_label: str
    description: str


@dataclass(frozen=True)
class HeatmapGallery:
    """Slides with their heatmaps, below the colour bars."""

    kind: ClassVar[str] = "heatmaps"
    heatmaps: Sequence[SlideHeatmap]
    colour_bars: Sequence[ColourBar]
    title: str = ""


@dataclass(frozen=True)
class TileImage:
    """A tile with its value, such as its contribution to the logit."""

    image: EmbeddedImage
    slide_id: str
    value: str


@dataclass(frozen=True)
class TileGallery:
    """The most influential tiles for one target, from slides with the same call."""

    kind: ClassVar[str] = "tiles"
    title: str
    tiles: Sequence[TileImage]
    note: str = ""


Block = Table | Figure | Paragraph | Code | Collapsible | PredictionTable | HeatmapGallery | TileGallery


@dataclass(frozen=True)
class PageSection:
    """A section of a report: a title, an introduction and blocks."""

    title: str
    blocks: Sequence[Block]
    intro: str = ""


@dataclass(frozen=True)
class Page:
    """The content of a report: header, main results, warnings and sections."""

    subject: str  # above the title: which runs or study
    title: str
    summary: Sequence[str]
    headline: Table | None
    warnings: Sequence[str]
    sections: Sequence[PageSection]
    created: str  # date and version of tapfm

"""Text and scale bars on images."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tapfm.slides.slide import WHITE, Colour

TEXT_COLOUR: Colour = (28, 30, 38)
_SCALE_BARS_UM = (20_000, 10_000, 5_000, 2_000, 1_000, 500, 200, 100, 50, 20, 10, 5)
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@cache
def load_font(size_px: int, *, bold: bool = False) -> Font:
    """Return the DejaVu font of matplotlib, which has µ and the letters of most languages, without importing it."""
    found = importlib.util.find_spec("matplotlib")
    if found is not None and found.origin is not None:
        name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
        file = Path(found.origin).parent / "mpl-data" / "fonts" / "ttf" / name
        if file.is_file():
            return ImageFont.truetype(file, size_px)
    return ImageFont.load_default(size=size_px)


def wrap_text(text: str, font: Font, width_px: float) -> list[str]:
    """Break a text into lines of at most `width_px`, between words if possible."""
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".lstrip()
        if font.getlength(joined) <= width_px:
            lines[-1] = joined
            continue
        lines += [word] if lines[-1] else []
        lines[-1] = word
        while font.getlength(lines[-1]) > width_px and len(lines[-1]) > 1:  # slide ids may be very long
            fits = next(n for n in range(len(lines[-1]), 0, -1) if n == 1 or font.getlength(lines[-1][:n]) <= width_px)
            lines[-1:] = [lines[-1][:fits], lines[-1][fits:]]
    return lines


@dataclass(frozen=True)
class ScaleBar:
    """A scale bar: its length in image pixels and its label."""

    length_px: int
    text: str

    @classmethod
    def fit(cls, mpp: float, max_px: float) -> ScaleBar:
        """Return the longest scale bar of at most `max_px` for an image of `mpp` microns per pixel."""
        length_um = next((um for um in _SCALE_BARS_UM if um / mpp <= max_px), _SCALE_BARS_UM[-1])
        text = f"{length_um / 1000:g} mm" if length_um >= 1000 else f"{length_um} µm"
        return cls(max(1, round(length_um / mpp)), text)

    def width_px(self, font: Font) -> int:
        """Return the width of the bar or its label, whichever is larger."""
        return max(self.length_px, round(font.getlength(self.text)))

    def draw(self, draw: ImageDraw.ImageDraw, right_px: int, bottom_px: int, font: Font) -> None:
        """Draw the bar with its label above; (right_px, bottom_px) is its bottom right corner."""
        draw.line((right_px - self.length_px, bottom_px - 2, right_px - 1, bottom_px - 2), TEXT_COLOUR, 3)
        fits = font.getlength(self.text) <= self.length_px
        position = (right_px - self.length_px / 2, bottom_px - 8) if fits else (right_px, bottom_px - 8)
        draw.text(position, self.text, TEXT_COLOUR, font, anchor="ms" if fits else "rs")


class TextBlock:
    """An image of fixed width that grows downwards as text is written."""

    def __init__(self, width_px: int, margin_px: int, max_height_px: int = 4096) -> None:
        self.image = Image.new("RGB", (width_px, max_height_px), WHITE)
        self.draw = ImageDraw.Draw(self.image)
        self.margin_px, self.y_px = margin_px, 0

    @property
    def inner_width_px(self) -> int:
        """Width between the margins."""
        return self.image.width - 2 * self.margin_px

    def write(self, text: str, font: Font, size_px: int, colour: Colour = TEXT_COLOUR) -> None:
        """Write a text below the previous one, wrapped to the width."""
        for line in wrap_text(text, font, self.inner_width_px):
            self.draw.text((self.margin_px, self.y_px + size_px), line, colour, font, anchor="ls")
            self.y_px += round(size_px * 1.45)

    def to_image(self) -> Image.Image:
        """Return the image, cropped below the last line."""
        return self.image.crop((0, 0, self.image.width, self.y_px))

"""Words and scale bars on pictures."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tapfm.slides.slide import WHITE, Colour

INK: Colour = (28, 30, 38)
_SCALE_BARS_UM = (20_000, 10_000, 5_000, 2_000, 1_000, 500, 200, 100, 50, 20, 10, 5)
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@cache
def font(size_px: int, *, bold: bool = False) -> Font:
    """Give a font that has µ and the letters of most languages: it comes with matplotlib, which is not imported."""
    found = importlib.util.find_spec("matplotlib")
    if found is not None and found.origin is not None:
        name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
        file = Path(found.origin).parent / "mpl-data" / "fonts" / "ttf" / name
        if file.is_file():
            return ImageFont.truetype(file, size_px)
    return ImageFont.load_default(size=size_px)


def lines_of(text: str, letters: Font, width_px: float) -> list[str]:
    """Break a text into lines that fit, between words where that can be."""
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".lstrip()
        if letters.getlength(joined) <= width_px:
            lines[-1] = joined
            continue
        lines += [word] if lines[-1] else []
        lines[-1] = word
        while letters.getlength(lines[-1]) > width_px and len(lines[-1]) > 1:  # the id of a slide may be very long
            fits = next(
                n for n in range(len(lines[-1]), 0, -1) if n == 1 or letters.getlength(lines[-1][:n]) <= width_px
            )
            lines[-1:] = [lines[-1][:fits], lines[-1][fits:]]
    return lines


@dataclass(frozen=True)
class ScaleBar:
    """A round length, and how long it is on a picture."""

    length_px: int
    text: str

    @classmethod
    def of(cls, mpp: float, most_px: float) -> ScaleBar:
        """Find the longest one that has at most `most_px` on a picture with `mpp` microns per pixel."""
        length_um = next((um for um in _SCALE_BARS_UM if um / mpp <= most_px), _SCALE_BARS_UM[-1])
        text = f"{length_um / 1000:g} mm" if length_um >= 1000 else f"{length_um} µm"
        return cls(max(1, round(length_um / mpp)), text)

    def width_px(self, letters: Font) -> int:
        """Say how much room it takes."""
        return max(self.length_px, round(letters.getlength(self.text)))

    def draw(self, draw: ImageDraw.ImageDraw, right_px: int, bottom_px: int, letters: Font) -> None:
        """Draw it, the words above the bar."""
        draw.line((right_px - self.length_px, bottom_px - 2, right_px - 1, bottom_px - 2), INK, 3)
        fits = letters.getlength(self.text) <= self.length_px
        place = (right_px - self.length_px / 2, bottom_px - 8) if fits else (right_px, bottom_px - 8)
        draw.text(place, self.text, INK, letters, anchor="ms" if fits else "rs")


class Column:
    """A strip of paper that grows as words and bars are put on it from top to bottom."""

    def __init__(self, width_px: int, margin_px: int, tallest_px: int = 4096) -> None:
        self.picture = Image.new("RGB", (width_px, tallest_px), WHITE)
        self.draw = ImageDraw.Draw(self.picture)
        self.margin_px, self.y_px = margin_px, 0

    @property
    def inner_px(self) -> int:
        """Width between the margins."""
        return self.picture.width - 2 * self.margin_px

    def write(self, text: str, letters: Font, size_px: int, colour: Colour = INK) -> None:
        """Write a text, in as many lines as it takes."""
        for line in lines_of(text, letters, self.inner_px):
            self.draw.text((self.margin_px, self.y_px + size_px), line, colour, letters, anchor="ls")
            self.y_px += round(size_px * 1.45)

    def paper(self) -> Image.Image:
        """Give what was written on."""
        return self.picture.crop((0, 0, self.picture.width, self.y_px))

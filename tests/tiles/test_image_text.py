"""Words and scale bars on pictures."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tapfm.tiles.image_text import ScaleBar, TextBlock, load_font, wrap_text


def drawn(text):
    picture = Image.new("L", (60, 60), 255)
    ImageDraw.Draw(picture).text((10, 10), text, 0, load_font(30))
    return np.asarray(picture)


def test_the_font_has_the_letters_that_slides_need():
    missing = drawn("\U0010ffff")
    for letter in "µ²−·éüßłΔЖ":
        assert (drawn(letter) != missing).any(), letter


def test_lines_are_broken_between_words_and_long_words_within():
    font = load_font(12)
    text = "one two three " + "x" * 200
    lines = wrap_text(text, font, 100)
    assert all(font.getlength(line) <= 100 for line in lines)
    assert lines[0] == "one two three"
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert wrap_text("", font, 100) == [""]


@pytest.mark.parametrize(
    ("mpp", "most_px", "expected"),
    [(0.5, 400, (400, "200 µm")), (10, 200, (200, "2 mm")), (10, 199, (100, "1 mm")), (0.5, 1, (10, "5 µm"))],
)
def test_a_scale_bar_is_round_and_as_long_as_it_says(mpp, most_px, expected):
    bar = ScaleBar.fit(mpp, most_px)
    assert (bar.length_px, bar.text) == expected


def test_a_drawn_scale_bar_has_exactly_its_length():
    picture = Image.new("RGB", (300, 60), "white")
    ScaleBar(123, "100 µm").draw(ImageDraw.Draw(picture), 280, 50, load_font(12))
    row = np.flatnonzero(np.asarray(picture)[48, :, 0] < 128)
    assert (row[0], row[-1]) == (280 - 123, 279)


def test_a_column_is_as_tall_as_its_words():
    column = TextBlock(200, 10)
    column.write("a few words that need more than one line", load_font(12), 12)
    paper = np.asarray(column.to_image().convert("L"))
    assert paper.shape[1] == 200
    assert 2 * 12 < paper.shape[0] < 6 * 12
    assert (paper[:, :9] == 255).all()
    assert (paper[:, -9:] == 255).all()

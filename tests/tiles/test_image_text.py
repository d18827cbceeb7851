"""Text and scale bars on images."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tapfm.tiles.image_text import ScaleBar, TextBlock, load_font, wrap_text


def render_text(text):
    image = Image.new("L", (60, 60), 255)
    ImageDraw.Draw(image).text((10, 10), text, 0, load_font(30))
    return np.asarray(image)


def test_font_has_special_characters():
    missing = render_text("\U0010ffff")
    for letter in "µ²−·éüßłΔЖ":
        assert (render_text(letter) != missing).any(), letter


def test_text_is_wrapped_between_words_and_within_long_words():
    font = load_font(12)
    text = "one two three " + "x" * 200
    lines = wrap_text(text, font, 100)
    assert all(font.getlength(line) <= 100 for line in lines)
    assert lines[0] == "one two three"
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert wrap_text("", font, 100) == [""]


@pytest.mark.parametrize(
    ("mpp", "max_px", "expected"),
    [(0.5, 400, (400, "200 µm")), (10, 200, (200, "2 mm")), (10, 199, (100, "1 mm")), (0.5, 1, (10, "5 µm"))],
)
def test_scale_bar_has_a_round_length(mpp, max_px, expected):
    bar = ScaleBar.fit(mpp, max_px)
    assert (bar.length_px, bar.text) == expected


def test_scale_bar_is_drawn_with_its_length():
    image = Image.new("RGB", (300, 60), "white")
    ScaleBar(123, "100 µm").draw(ImageDraw.Draw(image), 280, 50, load_font(12))
    row = np.flatnonzero(np.asarray(image)[48, :, 0] < 128)
    assert (row[0], row[-1]) == (280 - 123, 279)


def test_text_block_is_cropped_below_the_text():
    block = TextBlock(200, 10)
    block.write("a few words that need more than one line", load_font(12), 12)
    pixels = np.asarray(block.to_image().convert("L"))
    assert pixels.shape[1] == 200
    assert 2 * 12 < pixels.shape[0] < 6 * 12
    assert (pixels[:, :9] == 255).all()
    assert (pixels[:, -9:] == 255).all()

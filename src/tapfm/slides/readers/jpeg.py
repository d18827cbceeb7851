"""JPEG tiles, only as far down as they are needed.

A JPEG is coded from the top. When a read touches only the upper rows of a tile, telling the decoder that the picture is
lower than it is makes it stop there; the rows it gives are the same.
"""

from __future__ import annotations

import struct

import imagecodecs

from tapfm.slides.slide import Pixels

BASELINE = (0xC0, 0xC1)  # frames that are coded row by row; progressive ones are not
STANDALONE = (0x01, *range(0xD0, 0xD9))  # markers without a length


def decode_jpeg(data: bytes, tables: bytes | None, colour_space: str, rows: int | None = None) -> Pixels:
    """Decode a JPEG to RGB; with `rows`, at least so many of its upper rows."""
    if rows is not None:
        data = lower(data, rows)
    pixels: Pixels = imagecodecs.jpeg8_decode(data, tables=tables, colorspace=colour_space, outcolorspace="RGB")
    return pixels


def lower(data: bytes, rows: int) -> bytes:
    """Declare a JPEG to be only as high as `rows` need; unchanged where that cannot be done."""
    at = frame_header(data)
    if at is None:
        return data
    height_px = struct.unpack_from(">H", data, at + 5)[0]
    components = data[at + 9]
    sampling = max(data[at + 11 + 3 * i] & 0x0F for i in range(components))
    unit_px = 8 * sampling  # rows are coded in units of this height
    # one unit more than needed: smooth upsampling of colour looks at the row below
    needed_px = (-(-rows // unit_px) + 1) * unit_px
    if needed_px >= height_px:
        return data
    return data[: at + 5] + struct.pack(">H", needed_px) + data[at + 7 :]


def frame_header(data: bytes) -> int | None:
    """Find where the header of a baseline frame begins, or None."""
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in BASELINE:
            return at
        if marker in STANDALONE:
            at += 2
        elif marker == 0xFF:  # a fill byte
            at += 1
        elif marker >= 0xC0:
            at += 2 + struct.unpack_from(">H", data, at + 2)[0]
        else:
            return None
        if marker in (0xC2, 0xDA):  # progressive, or already the scan
            return None
    return None

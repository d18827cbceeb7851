"""JPEG tiles, only as far down as they are needed.

A JPEG is coded from the top. When a read touches only the upper rows of a tile, telling the decoder that the picture is
lower than it is makes it stop there; the rows it gives are the same.
"""

from __future__ import annotations

import struct

import imagecodecs

from tapfm.slides.slide import Pixels

_BASELINE = (0xC0, 0xC1)  # frames that are coded row by row; progressive ones are not
_END_OF_IMAGE = b"\xff\xd9"  # cannot occur inside coded pixels
_STANDALONE = (0x01, *range(0xD0, 0xD9))  # markers without a length


def decode_jpeg(data: bytes, tables: bytes | None, colour_space: str, rows: int | None = None) -> Pixels:
    """Decode a JPEG to RGB; with `rows`, at least so many of its upper rows."""
    lowered, exact_rows = _lower(data, rows) if rows is not None else (data, None)
    pixels: Pixels = imagecodecs.jpeg8_decode(lowered, tables=tables, colorspace=colour_space, outcolorspace="RGB")
    return pixels if exact_rows is None else pixels[:exact_rows].copy()


def check_whole(data: bytes) -> None:
    """Refuse a JPEG that breaks off: libjpeg would paint what is missing grey, and say nothing."""
    if data.rfind(_END_OF_IMAGE) < 0:
        raise ValueError("it breaks off")


def _lower(data: bytes, rows: int) -> tuple[bytes, int | None]:
    """Declare a JPEG to be only as high as `rows` need, and say how many rows come out exact; all where it is None."""
    at = _frame_header(data)
    if at is None:
        return data, None
    height_px = struct.unpack_from(">H", data, at + 5)[0]
    components = data[at + 9]
    sampling = max(data[at + 11 + 3 * i] & 0x0F for i in range(components))
    unit_px = 8 * sampling  # rows are coded in units of this height
    exact_px = -(-rows // unit_px) * unit_px
    # one unit more: smooth upsampling of colour looks at the row below, and the last one has none
    declared_px = exact_px + unit_px
    if declared_px >= height_px:
        return data, None
    return data[: at + 5] + struct.pack(">H", declared_px) + data[at + 7 :], exact_px


def _frame_header(data: bytes) -> int | None:
    """Find where the header of a baseline frame begins, or None."""
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in _BASELINE:
            return at
        if marker in _STANDALONE:
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

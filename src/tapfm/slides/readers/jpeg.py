"""Partial decoding of JPEG tiles.

A baseline JPEG is coded from top to bottom. If only its upper rows are needed, a smaller height in its header makes the
decoder stop early. The returned rows are identical to those of a full decoding.
"""

from __future__ import annotations

import struct

import imagecodecs

from tapfm.slides.slide import Pixels

_BASELINE = (0xC0, 0xC1)  # frame markers of sequential JPEGs; progressive ones cannot be decoded row by row
_END_OF_IMAGE = b"\xff\xd9"  # cannot occur inside the coded data
_STANDALONE = (0x01, *range(0xD0, 0xD9))  # markers without a length field


def decode_jpeg(data: bytes, tables: bytes | None, colour_space: str, rows: int | None = None) -> Pixels:
    """Decode a JPEG to RGB; with `rows`, at least that many of its upper rows."""
    shortened, exact_rows = _reduce_height(data, rows) if rows is not None else (data, None)
    pixels: Pixels = imagecodecs.jpeg8_decode(shortened, tables=tables, colorspace=colour_space, outcolorspace="RGB")
    return pixels if exact_rows is None else pixels[:exact_rows].copy()


def check_complete(data: bytes) -> None:
    """Raise ValueError if a JPEG is truncated; libjpeg would fill the missing part with grey without an error."""
    if data.rfind(_END_OF_IMAGE) < 0:
        raise ValueError("the JPEG data is truncated")


def _reduce_height(data: bytes, rows: int) -> tuple[bytes, int | None]:
    """Return the JPEG with the height in its header reduced, and the number of exact rows.

    The data is returned unchanged with None if all rows have to be decoded.
    """
    at = _find_frame_header(data)
    if at is None:
        return data, None
    height_px = struct.unpack_from(">H", data, at + 5)[0]
    components = data[at + 9]
    sampling = max(data[at + 11 + 3 * i] & 0x0F for i in range(components))
    unit_px = 8 * sampling  # height of a row of coded blocks
    exact_px = -(-rows // unit_px) * unit_px
    # One more row of blocks: chroma upsampling uses the row below.
    declared_px = exact_px + unit_px
    if declared_px >= height_px:
        return data, None
    return data[: at + 5] + struct.pack(">H", declared_px) + data[at + 7 :], exact_px


def _find_frame_header(data: bytes) -> int | None:
    """Return the offset of the header of a baseline frame; None if there is none."""
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

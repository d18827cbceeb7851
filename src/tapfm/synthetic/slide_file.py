"""A painted slide as a file: an SVS as Aperio's scanners write it, which OpenSlide and QuPath open."""

from __future__ import annotations

import io

import cv2
import numpy as np
import tifffile

from tapfm.slides.slide import Pixels
from tapfm.synthetic.scanning import Scanner

_TILE_PX = 256
_PYRAMID = (1, 4, 16)
_LIBRARY = "Aperio Image Library v12.0.15"  # what readers know the format by


def encode_svs(pixels: Pixels, scanner: Scanner, slide_id: str) -> bytes:
    """Make the file: a pyramid of JPEG tiles, and a thumbnail, a label and an overview as real ones have."""
    height, width = pixels.shape[:2]
    size = f"{width}x{height} [0,0 {width}x{height}] ({_TILE_PX}x{_TILE_PX})"
    about = f"{_LIBRARY}\r\n{size} JPEG/RGB Q={scanner.jpeg_quality}"
    facts = (
        f"|AppMag = {scanner.objective}|MPP = {scanner.mpp:.4f}|Filename = {slide_id}|ScanScope ID = {scanner.name}"
        "|Source = painted by tapfm synth, no patient"
    )
    tiled = {
        "tile": (_TILE_PX, _TILE_PX),
        "photometric": "rgb",
        "compression": "jpeg",
        "compressionargs": {"level": scanner.jpeg_quality},
        "metadata": None,
        "software": False,
    }
    whole = {name: value for name, value in tiled.items() if name != "tile"} | {"rowsperstrip": 16}
    smallest = _downsample(pixels, max(1, round(max(height, width) / 768)))
    label, overview = _render_label(slide_id), _render_macro(smallest)
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        writer.write(pixels, description=about + facts, **tiled)
        # Aperio puts the thumbnail second, the lower levels after it
        writer.write(smallest, description=f"{about} -> {smallest.shape[1]}x{smallest.shape[0]}{facts}", **whole)
        for downsample in _PYRAMID[1:]:
            if min(height, width) // downsample < _TILE_PX // 4:
                break
            level = _downsample(pixels, downsample)
            writer.write(level, description=f"{about} -> {level.shape[1]}x{level.shape[0]}{facts}", **tiled)
        for name, picture, kind in (("label", label, 1), ("macro", overview, 9)):
            words = f"{_LIBRARY}\r\n{name} {picture.shape[1]}x{picture.shape[0]}"
            writer.write(picture, description=words, subfiletype=kind, **whole)
    return file.getvalue()


def _downsample(pixels: Pixels, downsample: int) -> Pixels:
    """Average squares of pixels."""
    size = pixels.shape[1] // downsample, pixels.shape[0] // downsample
    return np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA))


def _render_label(slide_id: str) -> Pixels:
    """Draw a paper label; it names no one."""
    picture = np.full((300, 300, 3), 250, np.uint8)
    for row, (text, size) in enumerate([(slide_id, 1.6), ("H&E", 1.0), ("SYNTHETIC", 0.9), ("no patient", 0.8)]):
        cv2.putText(picture, text, (24, 80 + 58 * row), cv2.FONT_HERSHEY_SIMPLEX, size, (30, 30, 40), 2, cv2.LINE_AA)
    return picture


def _render_macro(thumbnail: Pixels) -> Pixels:
    """Draw the whole glass, with the tissue somewhere on it."""
    picture = np.full((400, 1000, 3), 236, np.uint8)
    picture[:, :260] = 250
    scale = min(340 / thumbnail.shape[0], 600 / thumbnail.shape[1])
    small = cv2.resize(thumbnail, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    top, left = (400 - small.shape[0]) // 2, 320
    picture[top : top + small.shape[0], left : left + small.shape[1]] = small
    return picture

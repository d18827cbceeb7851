"""Slide readers: OpenSlide, TIFF, plain images."""

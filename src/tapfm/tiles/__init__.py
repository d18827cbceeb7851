"""Tiles: tiling of slides, tile files, reading and augmentation."""

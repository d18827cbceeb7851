"""Tiles: the grid on a slide, and the files that keep it."""

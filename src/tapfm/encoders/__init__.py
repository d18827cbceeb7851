"""Tile encoders: the catalogue, their weights, and eq. 1."""

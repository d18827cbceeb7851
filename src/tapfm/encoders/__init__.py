"""Tile encoders: the catalogue, weights, and the ViT that returns features and raw attention (eq. 1)."""

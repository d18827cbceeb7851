"""Slides: what a file says of itself, its pixels at any scale, where its tissue is."""

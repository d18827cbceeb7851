"""Synthetic H&E slides with a planted signal, to try and test tapfm without real slides."""

"""Adapt a pathology foundation model to your task from slide labels, on one GPU."""

from tapfm.version import __version__

__all__ = ["__version__"]

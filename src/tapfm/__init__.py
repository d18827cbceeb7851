"""Adapt a pathology foundation model to your task from slide labels, on one GPU."""

__version__ = "0.1.0"

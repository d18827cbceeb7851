"""The version of tapfm."""

__version__ = "0.1.0"

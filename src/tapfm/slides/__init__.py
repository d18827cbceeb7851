"""Whole slide images: readers, metadata, resolution, tissue detection."""

"""Aggregators: from the tiles of a slide to its logits."""

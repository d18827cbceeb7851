"""Aggregators: compute the logits of a slide from its tile features."""

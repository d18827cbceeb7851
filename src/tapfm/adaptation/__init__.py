"""Adaptation: the two-graph step and how it fits in memory."""

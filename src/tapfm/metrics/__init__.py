"""Metrics and tests as functions of arrays."""

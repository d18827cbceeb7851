"""Evaluation: what predictions are worth."""

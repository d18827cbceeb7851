"""Evaluating and comparing models: from slides to figures with intervals."""

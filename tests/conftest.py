"""Fixtures that several files use."""

from training_lab import lab, one_thread, train  # noqa: F401

"""Fixtures that several files use."""

from training_lab import lab, one_thread, own_lab, train  # noqa: F401

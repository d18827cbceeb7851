"""Fixtures that several files of this folder use."""

from training_lab import lab, one_thread, train  # noqa: F401

"""Fixtures that several files use, and how examples are drawn."""

from hypothesis import settings
from training_lab import lab, one_thread, own_lab, train  # noqa: F401

# the same examples every time, however slow the machine: a test fails for a change, not for a draw
settings.register_profile("tapfm", derandomize=True, deadline=None)
settings.load_profile("tapfm")

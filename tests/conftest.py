"""Shared fixtures, and the settings of hypothesis."""

from hypothesis import settings
from training_workspace import one_thread, train, workspace, workspace_copy  # noqa: F401

# always the same examples, and no time limit: a test must only fail because of a change in the code
settings.register_profile("tapfm", derandomize=True, deadline=None)
settings.load_profile("tapfm")

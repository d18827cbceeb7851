"""Run folders: data, checkpoints, saved models, exports."""

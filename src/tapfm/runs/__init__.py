"""Run folders: data, checkpoints, saved models and exports."""

"""Baselines that every evaluation compares with the model."""

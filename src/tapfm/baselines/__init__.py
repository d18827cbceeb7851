"""Baselines that every evaluation reports beside the model."""

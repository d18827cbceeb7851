"""Evaluation of predictions: metrics, subgroups, comparisons of models."""

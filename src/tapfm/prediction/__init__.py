"""Prediction of whole slides: probabilities, tile scores, heatmaps, galleries and files for QuPath."""

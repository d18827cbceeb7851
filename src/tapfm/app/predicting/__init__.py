"""Predicting whole slides: from files to probabilities, tables of tiles and pictures."""

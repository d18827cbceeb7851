"""Cohort tables: slides, patients, labels and splits."""

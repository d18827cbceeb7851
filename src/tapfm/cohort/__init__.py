"""Cohorts: slides, patients and labels from a table."""

"""Shared infrastructure of all commands: files, locks, worker processes, progress, signals, seeds and devices."""

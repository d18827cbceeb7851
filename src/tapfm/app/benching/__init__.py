"""Measurements of this machine, and what follows from them."""

"""Painted H&E slides with a planted signal, to try and to test everything without slides of one's own."""

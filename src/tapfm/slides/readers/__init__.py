"""One module for each way to open a slide."""

"""The command line: the only package that knows all the others."""

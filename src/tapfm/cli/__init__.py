"""The command line. Each command has a module that defines its help text and prints its results."""

"""The command line: one module per command that parses, calls the workflow and prints."""

"""One module per command: its options, a dataclass, and the function that runs it."""

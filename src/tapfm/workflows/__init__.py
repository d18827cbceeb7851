"""One module per command: an options dataclass and a function."""

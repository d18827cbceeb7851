"""`tapfm demo`: the whole of tapfm on painted slides, by the commands that a user would type."""

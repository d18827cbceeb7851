"""`tapfm demo`: all of tapfm on synthetic slides, by the commands that a user would type."""

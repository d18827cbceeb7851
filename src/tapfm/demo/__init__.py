"""`tapfm demo`: run the complete workflow on synthetic slides."""

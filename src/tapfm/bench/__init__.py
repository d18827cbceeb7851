"""`tapfm bench`: speed and memory of this machine, and the time that a run will take."""

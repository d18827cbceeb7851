"""The colour baseline, which `tapfm evaluate` compares with the model if it has the training slides of the run."""

"""The colour baseline. `tapfm evaluate` compares it with the model if the training slides of the run are available."""

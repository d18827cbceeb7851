"""Studies: train and evaluate many combinations of encoder, regime and aggregator, and write comparison tables."""

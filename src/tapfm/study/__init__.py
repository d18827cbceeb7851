"""Studies: train and evaluate many combinations of encoder, method and aggregator, and write comparison tables."""

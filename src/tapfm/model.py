"""An encoder, an aggregator and a task that belong together."""

"""The local web viewer: slides at native resolution under the numbers of a prediction."""

"""Inference: from the tiles or stored features of a slide to logits and tile scores."""

"""The one path from a slide's tiles or features to logits and tile scores."""

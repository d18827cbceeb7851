"""What a model says of a whole slide, tile by tile, and the pictures and files that show it."""

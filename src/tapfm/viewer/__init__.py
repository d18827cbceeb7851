"""Local web viewer: slides at full resolution with heatmaps and tile values of a prediction."""

"""Studies: grids of runs, their evaluations, and the paper's tables."""

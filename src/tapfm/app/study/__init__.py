"""Studies: many runs, their evaluations, and the tables that compare them."""

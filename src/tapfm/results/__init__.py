"""Tables and figures as values, and the writers that render them."""

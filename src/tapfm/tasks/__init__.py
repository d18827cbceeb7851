"""Tasks: what is predicted, its loss and its class weights."""

"""Prediction tasks: targets, labels, losses and class weights."""

"""Run folders, checkpoints, saved models and exports.

A run folder contains all files of a training run. A saved model is the model of the best epoch of a run, or the
model in an export, loaded for inference. An export is a folder with the model of a run, for sharing or for use with
timm.
"""

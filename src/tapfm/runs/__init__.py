"""Run folders, checkpoints, saved models and exports.

A run folder contains all files of a training run. A saved model is the model of its best epoch, or of an export,
loaded for inference. An export is a folder with this model only, for sharing or for use with timm.
"""

"""Compute predictions, scores and text losses of a trained model."""

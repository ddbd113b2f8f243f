"""Predictions, scores and text losses of a trained model."""

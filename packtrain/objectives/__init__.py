"""Losses of the objectives, as functions of log-probabilities."""

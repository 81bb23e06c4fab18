"""The objectives, a folder each, and their losses as functions of log-probabilities."""

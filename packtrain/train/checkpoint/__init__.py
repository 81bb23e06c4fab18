"""Checkpoints: complete or absent, and only of a run that goes on with them."""

"""Kahneman-Tversky optimisation."""

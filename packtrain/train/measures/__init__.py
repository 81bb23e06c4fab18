"""Figures of tasks and of generated answers, measured with evaluations."""

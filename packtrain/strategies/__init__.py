"""Strategies: how a run spreads weights, gradients and optimizer states over its processes."""

"""Optimizers: one table of all that a run can have, and those that are packtrain's own."""

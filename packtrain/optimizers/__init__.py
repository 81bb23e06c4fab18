"""Optimizers: the table of all, and packtrain's own."""

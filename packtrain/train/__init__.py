"""Training: one process per device, with the same code on one and on many."""

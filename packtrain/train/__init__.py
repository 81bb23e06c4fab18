"""The training itself: one process per device, the same code on one and on many."""

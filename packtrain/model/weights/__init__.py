"""Weights of a sharded model, read, hashed and written one at a time."""

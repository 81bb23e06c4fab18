"""Fully sharded data parallel, by torch."""

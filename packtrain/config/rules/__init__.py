"""Combinations of keys that cannot work, refused before anything is loaded."""

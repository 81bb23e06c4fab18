"""Rows of any known shape become conversations, pairs, texts or tokens."""

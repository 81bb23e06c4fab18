"""Rows to token ids and loss masks, and where they are kept."""

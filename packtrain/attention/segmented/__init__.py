"""Attention by an ordinary function, called once for each length of segments."""

"""Parse rows of any known shape into conversations, pairs, texts or tokens."""

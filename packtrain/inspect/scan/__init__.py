"""One pass over all tokens, by arrays: who says them, what is odd about them, and which documents repeat others."""

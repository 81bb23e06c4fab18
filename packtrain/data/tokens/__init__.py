"""Token ids and loss masks of rows, and their cache."""

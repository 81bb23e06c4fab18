"""A plan on one screen: what the run comes to, the memory as bars, what is odd, and the command."""

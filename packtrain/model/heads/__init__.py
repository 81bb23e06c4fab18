"""Output heads: the summed loss of documents, and the score of a reward model."""

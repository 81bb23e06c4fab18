"""Output heads: the loss of documents, summed, and the score of a reward model."""

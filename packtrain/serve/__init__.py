"""After the training: adapters merged, models exported, measured on held-out documents, and talked to."""

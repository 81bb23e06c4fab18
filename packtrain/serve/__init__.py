"""After training: merge adapters, export models, measure them on held-out documents, chat."""

"""The reports of all machines of a run, compared, and the links between them."""

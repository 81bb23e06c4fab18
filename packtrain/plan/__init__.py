"""Plan of a run: its processes, batch, network and memory, computed before the start."""

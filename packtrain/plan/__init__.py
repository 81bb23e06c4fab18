"""The plan of a run: its processes, batch, network and memory, computed from the config and what is known of the machine."""

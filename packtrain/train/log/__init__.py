"""Output of a run: the terminal and the log files, metrics.jsonl, trackers."""

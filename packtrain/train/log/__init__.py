"""What a run tells of itself: the terminal and the log files, metrics.jsonl, trackers."""

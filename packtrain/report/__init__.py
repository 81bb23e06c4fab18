"""What a run folder shows of its run, as one HTML file."""

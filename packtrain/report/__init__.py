"""What a run folder tells of its run, as one HTML file."""

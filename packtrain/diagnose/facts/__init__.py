"""What is known of one machine, as values."""

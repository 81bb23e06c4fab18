"""What each objective trains on, its trainer, and its proofs; the loop that they share is in train/loop.py."""

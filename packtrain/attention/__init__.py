"""Exact attention over flattened rows, and the proof that it is exact on the loaded model."""

"""Measured proofs on the loaded model: exact attention backends, harmless changes."""

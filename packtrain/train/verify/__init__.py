"""Proofs on the loaded model: packed rows train like lone documents; changes compute the same."""

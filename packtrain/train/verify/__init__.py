"""Proofs on the loaded model: that packed rows train as the documents alone, as a report; that a change computes the same."""

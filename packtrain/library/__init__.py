"""Packed forward passes for TRL's trainers and plain transformers models in users' own scripts."""

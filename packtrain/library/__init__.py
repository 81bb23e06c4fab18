"""Packing for other people's scripts: TRL's trainers and plain transformers models."""

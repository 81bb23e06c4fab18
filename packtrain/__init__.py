"""packtrain: YAML-driven fine-tuning of language models on packed sequences, proved free of contamination."""

__version__ = "0.1.0"

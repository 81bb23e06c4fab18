"""For people who keep their own script: packed forward passes for TRL's trainers and plain transformers models."""

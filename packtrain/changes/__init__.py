"""Changes to the loaded model's computation: less time or memory, the same training."""

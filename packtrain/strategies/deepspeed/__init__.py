"""The ZeRO stages, by DeepSpeed."""

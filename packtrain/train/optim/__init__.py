"""The step of an optimizer: groups of weights, float32 over bfloat16, masters off the middle of their cells."""

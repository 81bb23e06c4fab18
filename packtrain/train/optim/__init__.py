"""The step of an optimizer: groups of weights, float32 over bfloat16, dithered masters, a kernel."""

"""Changes to how the loaded model computes: faster, or in less memory, and proved to train the same."""

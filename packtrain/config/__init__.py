"""User input: YAML and command line become a typed, checked config. Nothing here imports torch."""

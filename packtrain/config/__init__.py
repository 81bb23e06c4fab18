"""What the user writes, from YAML and command line to a typed and checked config; nothing here imports torch."""

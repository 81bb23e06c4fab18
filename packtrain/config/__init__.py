"""What the user writes, from YAML and command line to a typed and checked `RunConfig`; nothing here imports torch."""

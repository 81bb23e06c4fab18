"""The weights of a model that is spread by FSDP2, one slice or one weight at a time: read from files, hashed, written to files."""

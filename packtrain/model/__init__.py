"""The model: loading, adapters, forward pass, reference and sharding."""

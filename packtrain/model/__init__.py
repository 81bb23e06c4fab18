"""The model: loading it, adapters, its forward pass, the reference of preference training, and spreading it over processes."""

"""What is known of a model before it is loaded: the values of its config, and the shapes of its weights."""

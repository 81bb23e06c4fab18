"""What a run takes on each device, from the shapes of the weights alone."""

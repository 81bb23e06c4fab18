"""Updates that are not lost in the rounding of the weights: how they are made, measured, and kept in final/."""

"""Updates that survive the rounding of the weights: made, measured, and kept in final/."""

"""Exact attention over flattened rows: no token sees a token of another document.

Read `backends` first: which backend does what, and how one is put in place on a model. Then `segmented` (any device) and
`flash` (GPU kernels, in kernels/), which replace the model's attention function; `segmented_modules` for models whose
attention is code of their own; `per_document` for models that cannot be flattened. `sliding_window` and `rotary` hold what
layers need to know beside the segments of the row.
"""

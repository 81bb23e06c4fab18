"""Exact attention over flattened rows: no token sees a token of another document.

Read `backends` first: it describes the backends and installs one on a model. Then `segmented` (any device) and
`flash` (GPU kernels, in kernels/), which replace the model's attention function, and `per_document` for models that cannot
be flattened. `sliding_window` handles windows and chunks, `forwards` calls and length-dependent rotary embeddings.
"""

"""Exact attention over flattened rows: no token sees a token of another document.

Read `backends` first: it describes the backends, each a file, and installs one on a model. spec.py declares them. `segmented` (any device) and
`flash` (GPU kernels) replace the model's attention function, by `flattened`; `mixers` runs the modules that mix tokens
per document, and `per_document` the whole model.
`forwards` handles calls and length-dependent rotary embeddings.
"""

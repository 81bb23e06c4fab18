"""From document lengths to what the model reads: `schedule` (the documents of a step), `bins` (rows filled over an epoch), `balance`
(a step over ranks and micro-batches), `collate` (tensors), and `segments` (which tokens of a row may attend to which)."""

"""From document lengths to what the model reads: which documents share a step, a device and a row.

In the order of the work: `schedule` (the documents of a step), `bins` (rows filled over a whole epoch), `balance` (one step
over ranks and micro-batches), `collate` (tensors), and `segments` (which tokens of a row may attend to which).
"""

"""Packing: turn document lengths into model inputs. `schedule` chooses the documents of a step, `bins` fills rows over an epoch, `balance`
spreads a step over ranks and micro-batches, `collate` makes tensors, and `segments` says what each token of a row may attend to."""

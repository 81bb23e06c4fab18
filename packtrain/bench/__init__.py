"""`packtrain bench`: which packing mode and which sizes train a config fastest on this machine, measured by training it.

`search` decides what is tried next (pure), `trials` trains it in the run's own loop, `launches` starts the processes and goes on
without what ran out of memory, `bench_table` shows the result.
"""

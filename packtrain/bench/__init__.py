"""`packtrain bench`: which packing mode and which sizes train a config fastest on this machine, measured by short runs of it.

`search` decides what is tried (pure), `launches` makes a short run of each, `measured_run` is such a run in its processes, and
`bench_table` shows the result.
"""

"""`packtrain bench`: measure which packing mode and sizes train a config fastest on this machine.

It makes short runs of the config. `search` decides what to try (pure), `launches` makes the short runs and shows the result, and
`measured_run` runs in their processes.
"""

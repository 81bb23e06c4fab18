"""The network of a machine, and what NCCL and gloo are told of it."""

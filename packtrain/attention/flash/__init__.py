"""Attention by variable-length kernels for GPUs, and the choice of one for a layer."""

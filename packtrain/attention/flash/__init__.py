"""Attention by kernels for rows of many lengths, and the choice of a kernel for each layer."""

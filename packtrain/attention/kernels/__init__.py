"""Variable-length attention kernels for GPUs, and the choice of one for a layer."""

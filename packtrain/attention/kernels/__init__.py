"""Variable-length attention kernels for GPUs, and which one is right for a layer."""

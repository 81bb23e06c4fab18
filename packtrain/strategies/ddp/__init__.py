"""DistributedDataParallel: each process keeps everything."""

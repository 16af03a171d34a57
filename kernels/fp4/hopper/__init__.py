"""FP8 attention kernels for Hopper GPUs."""

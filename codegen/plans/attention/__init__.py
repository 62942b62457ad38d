"""Plans of the attention kernels."""

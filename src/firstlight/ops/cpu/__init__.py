"""Operators for CPUs, of stock PyTorch; compiled kernels will join behind the same contract."""

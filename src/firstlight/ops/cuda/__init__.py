"""Operators for CUDA devices, of stock PyTorch."""

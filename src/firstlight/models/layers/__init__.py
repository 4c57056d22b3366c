"""Layers that architectures share."""

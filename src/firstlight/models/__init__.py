"""Model architectures, one file each, over `models.layers`."""

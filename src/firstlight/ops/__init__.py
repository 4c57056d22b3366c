"""Every operator: `reference` in plain torch, fast versions per device, and collectives."""

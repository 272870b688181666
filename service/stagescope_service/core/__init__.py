"""TODO: what core holds."""

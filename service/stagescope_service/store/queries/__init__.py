"""TODO: what queries holds."""

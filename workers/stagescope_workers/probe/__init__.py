"""TODO: what probe holds."""

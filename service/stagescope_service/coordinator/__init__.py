"""TODO: what coordinator holds."""

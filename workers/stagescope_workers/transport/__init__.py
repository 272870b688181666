"""TODO: what transport holds."""

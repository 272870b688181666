"""TODO: what aggregation holds."""

"""TODO: what wire holds."""

"""TODO: what captures holds."""

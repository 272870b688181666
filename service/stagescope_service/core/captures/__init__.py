"""Capture requests: the plan that is in force, and the agreement of ranks on the captured steps."""

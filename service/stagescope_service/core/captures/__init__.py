"""Capture requests: the active plan, and the agreement of ranks on the captured steps."""

"""Forming a step's whole from what was read."""

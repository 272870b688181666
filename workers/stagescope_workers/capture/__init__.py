"""Capture with msprobe: from an order or a file to a dump, and the process as it was."""

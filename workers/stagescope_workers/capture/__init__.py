"""Capture with msprobe: from a request or a file to a dump, and the process as it was."""

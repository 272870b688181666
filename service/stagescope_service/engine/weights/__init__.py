"""Recorded weights held against each other."""

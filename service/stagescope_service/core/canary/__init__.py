"""Canary: log-probs of fixed sequences by version, and what they say about the engines."""

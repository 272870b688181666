"""Weights: checksums of tensors by version, and what they say about ranks and engines."""

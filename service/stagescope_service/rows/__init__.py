"""Aligns rows by sample and token position: for joined streams, for dumps and for comparison."""

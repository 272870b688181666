"""Aggregation of closed steps: step summaries, and payloads that are joined or recomputed."""

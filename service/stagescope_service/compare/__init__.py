"""Compare two or more things of one kind: arrays and tables in, verdicts out."""

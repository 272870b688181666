"""Compare what msprobe collected of operators."""

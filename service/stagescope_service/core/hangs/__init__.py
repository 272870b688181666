"""Hangs: which ranks are stuck, and the Python stacks that are asked of them."""

"""Triggers on the live service: rules held against each formed whole, and what follows."""

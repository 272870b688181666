"""Attach the probe to trainers from outside: one module or package for each framework."""

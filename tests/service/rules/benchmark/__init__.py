"""How good the doctor is: planted faults on realistic runs, and healthy runs of many kinds.

`python -m tests.service.rules.benchmark` prints each fault with its first cause, and the figures.
"""

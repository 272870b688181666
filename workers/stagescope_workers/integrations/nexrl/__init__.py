"""NexRL: steps, streams and parts of a training that does not change, and the replay of its dumps.

Read in NexRL 1.4.0 (6860191 of 2026-03-10). `plugin` lists the functions that are patched.
"""

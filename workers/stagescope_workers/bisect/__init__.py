"""Bisect: scores a kept step again in a ladder of arms, and names what makes the mismatch.

`stagescope bisect` is the command. `arms` and `verdict` are pure: they need no engine and no model.
Only `consistency.transformers_engine` needs torch.
"""

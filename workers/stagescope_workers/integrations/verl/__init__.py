"""Reports verl's training without a change to verl, which loads `plugin` by its entry point.

`plugin` installs `hooks` (the list of patched functions); a hook calls `driver` (the trainer's
process), `ranks` (actor, ref and critic) or `rollout` (agent loops). The driver decides whether
anything is reported: it injects a `context` into the batches that it sends to the ranks, and a rank
that gets none does nothing.
"""

"""verl, without a changed line: install the package, and verl loads `plugin` by its entry point.

`plugin` installs `hooks` (the list of what is patched); a hook calls `driver` (the trainer's
process), `ranks` (actor, ref and critic) or `rollout` (agent loops). The driver alone decides
whether anything is reported: it plants a `context` into the batches that it hands out, and a rank
that finds none does nothing.
"""

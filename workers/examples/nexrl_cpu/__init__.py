"""NexRL's own controller, trainer, dumper and actor on a CPU; needs a checkout of NexRL 1.4.

`train` is the command, `recipe.yaml` an ordinary NexRL configuration with a `debug:` block.
Stand-ins: the sockets of NexRL's train service (`service`) and the inference engine (`rollout`).
"""

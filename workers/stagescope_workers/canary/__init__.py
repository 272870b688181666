"""The training's side of a canary: fixed sequences, scored after each weight sync.

`Probe.canary` is the entry. `sequences` chooses the token sequences, `engine_arms` asks an engine,
`checks` draws conclusions that need no trainer, `trainer_scores` runs the trainer's model, and
`after_syncs` does all that in a training. Only `trainer_scores` needs torch.
"""

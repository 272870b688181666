"""AReaL: stages, streams, samples and scalars of a training that does not change.

Steps are AReaL's `global_step`, from 0. AReaL makes a pass before the update with
`recompute_logprob`, or in the decoupled loss with the methods `recompute` and `metrics`. Then the
trainer's log-probs are those of that pass, read before `compute_advantages` overwrites the engine's
with them. By default, and with the methods `loglinear` and `reuse_train_logp`, they come from the
update's own passes, mini-batch by mini-batch. From the second one on, the weights are not those at
the beginning of the step. AReaL's own `prox_logp` is then a copy of the engine's and is not used.

Whole trainings of AReaL of 2026-05-21 (4aef98d8) ran on CPU with it. Its `trainer/ppo/actor.py` was
also read in a later version with `turn_ids` and `reuse_train_logp`. Hooks that moved between the
two are patched in both.
"""

from __future__ import annotations

from typing import Final

from stagescope_workers.integrations.areal import ranks, trainer
from stagescope_workers.integrations.patches import Patch, Wrap

_ACTOR: Final = "areal.trainer.ppo.actor"
_CRITIC: Final = "areal.trainer.ppo.critic"
_TRAINER: Final = "areal.trainer.rl_trainer"


def patches() -> list[Patch]:
    """Return the patches of AReaL's ranks and, with any controller, of its trainer process."""
    log_prob = {"actor": "actor_compute_log_prob", "ref": "ref_compute_log_prob"}
    # Engines import trace_scope by name: its module is patched when it is imported, before them.
    hooks: list[tuple[str, str, Wrap, str]] = [
        ("areal.utils.perf_tracer", "trace_scope", trainer.wrap_scope, "stages of the trainer"),
        (_TRAINER, "PPOTrainer.__init__", trainer.wrap_init, "stages of the trainer"),
        (_TRAINER, "PPOTrainer.train", trainer.wrap_train, "the end of a training"),
        ("areal.utils.stats_logger", "StatsLogger.commit", trainer.wrap_commit,
         "scalars, and numbers in the trainer's log"),
        (_ACTOR, "PPOActorController.compute_advantages", trainer.wrap_count,
         "numbers in the trainer's log (controller v1)"),
        (_ACTOR, "PPOActorControllerV2.compute_advantages", trainer.wrap_count,
         "numbers in the trainer's log (controller v2)"),
        (_ACTOR, "PPOActor.__init__", ranks.wrap_init, "which models are trained"),
        (_ACTOR, "PPOActor.compute_logp", ranks.in_stage(log_prob),
         "actor_compute_log_prob, ref_compute_log_prob"),
        (_ACTOR, "PPOActor._compute_logp", ranks.wrap_forward, "streams before the update"),
        (_ACTOR, "PPOActor.compute_advantages", ranks.in_stage({"actor": "compute_advantage"}),
         "compute_advantage"),
        (_ACTOR, "PPOActor._compute_advantages", ranks.wrap_advantages, "rewards and advantages"),
        (_ACTOR, "PPOActor.ppo_update", ranks.wrap_update, "actor_update"),
        (_ACTOR, "grpo_loss_fn", ranks.wrap_loss, "streams of the update, and clipped tokens"),
        (_CRITIC, "PPOCritic.compute_values", ranks.in_stage({"critic": "compute_values"}),
         "compute_values"),
        (_CRITIC, "PPOCritic.ppo_update", ranks.in_stage({"critic": "critic_update"}),
         "critic_update"),
    ]  # fmt: skip
    return [Patch(module, path, wrap, purpose) for module, path, wrap, purpose in hooks]

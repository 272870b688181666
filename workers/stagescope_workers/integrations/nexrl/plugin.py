"""The functions of NexRL 1.4.0 that are patched, and what each tells.

The trainer's process (`training`), the ranks of the train service (`ranks`), NexRL's own dumps
(`dumper`), which stay as they are, and the replay of them (`replay`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stagescope_workers.integrations.nexrl import dumper, ranks, replay, trainer_calls
from stagescope_workers.integrations.patches import Function, Patch

_SINCE: Final = "1.4.0"
_BASE: Final = ("nexrl.trainer.base_trainer", "BaseTrainer")
_SELF_HOSTED: Final = ("nexrl.trainer.self_hosted_trainer", "SelfHostedTrainer")
_GRPO: Final = ("nexrl.trainer.self_hosted_grpo_trainer", "SelfHostedGrpoTrainer")
_DISTILLATION: Final = ("nexrl.trainer.self_hosted_opd_trainer", "SelfHostedOpdTrainer")
_DUMPER: Final = ("nexrl.utils.data_dumper", "DataDumper")
_ACTOR: Final = ("nexrl.train_service_backend.fsdp_worker.fsdp_actor", "DataParallelPPOActor")
_MOCK: Final = ("nexrl.mock.mock_rollout_worker", "MockRolloutWorker")

_Call = tuple[tuple[str, str], str, Callable[[Function], Function], str]
_CALLS: Final[tuple[_Call, ...]] = (
    (_BASE, "__init__", trainer_calls.wrap_base_init, "steps and scalars"),
    (_BASE, "_get_trajectories", trainer_calls.wrap_get_trajectories,
     "rollout_generate: trajectories, rewards, the rollout's log-probs"),
    (_BASE, "_main_loop", trainer_calls.wrap_main_loop, "the end of a training"),
    (_SELF_HOSTED, "__init__", trainer_calls.wrap_self_hosted_init,
     "actor_update and weight_sync of the trainer, and the ranks' step"),
    (_GRPO, "_compute_old_log_probs", trainer_calls.wrap_old_log_probs,
     "actor_compute_log_prob: both streams"),
    (_GRPO, "_prepare_batch", trainer_calls.wrap_prepare_batch, "advantages"),
    (_DISTILLATION, "_compute_old_log_probs", trainer_calls.wrap_old_log_probs,
     "actor_compute_log_prob of the distillation"),
    (_DISTILLATION, "_prepare_batch", trainer_calls.wrap_prepare_batch,
     "the rows of the distillation"),
    (_DUMPER, "should_dump", dumper.wrap_should_dump, "being called with what is not dumped"),
    (_DUMPER, "dump_trajectory", dumper.wrap_trajectory, "trajectories of an own trainer"),
    (_DUMPER, "dump_forward_data", dumper.wrap_forward_data, "log-probs of each part of an update"),
    (_DUMPER, "dump_loss", dumper.wrap_loss, "loss of each part of an update"),
    (_DUMPER, "dump_prepared_trajectories", dumper.wrap_prepared,
     "advantages of the remote API mode"),
    (_DUMPER, "dump_datums", dumper.wrap_datums, "datums of the remote API mode"),
    (_DUMPER, "dump_training_metrics", dumper.wrap_metrics, "metrics of the remote API mode"),
    (_ACTOR, "compute_log_prob", ranks.wrap_log_prob, "actor_compute_log_prob of each rank"),
    (_ACTOR, "update_policy", ranks.wrap_update, "actor_update of each rank"),
    (_ACTOR, "update_policy_with_distillation", ranks.wrap_update,
     "actor_update of each rank in the distillation"),
    (_ACTOR, "_forward_micro_batch", ranks.wrap_forward, "micro-batches of an update"),
    (_ACTOR, "_optimizer_step", ranks.wrap_optimizer_step, "mini-batches of an update"),
    (_MOCK, "__init__", replay.wrap_init, "the replay of a dump"),
    (_MOCK, "_load_trajectories", replay.wrap_load, "a dump that is refused, not passed over"),
    (_MOCK, "rollout", replay.wrap_rollout, "the trajectory of each task"),
)  # fmt: skip


def patches() -> list[Patch]:
    """Return the patches, in the order in which a step meets them."""
    return [
        Patch(module, f"{name}.{method}", wrap, purpose, since=_SINCE)
        for (module, name), method, wrap, purpose in _CALLS
    ]

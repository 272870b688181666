"""The functions of NexRL 1.4.0 that are patched, and what each tells.

The functions that NexRL's trainers call are wrapped here (see `training`), and so is its
`DataDumper`: it gets live data, and writes what its options say. NexRL calls `should_dump` before
anything else, and each `dump_...` calls it again before it writes. The first call also returns
True where stagescope reports that type. The second one, inside the original function, follows
NexRL's own options alone, so NexRL's files are those of a training without stagescope. The
ranks of the train service are in `ranks`, the replay of dumps is in `replay`.
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from stagescope_workers.integrations.nexrl import ranks, replay
from stagescope_workers.integrations.nexrl.rows import Trajectory
from stagescope_workers.integrations.nexrl.training import (
    CONTEXT,
    Batch,
    Trainer,
    Training,
    training,
)
from stagescope_workers.integrations.nexrl.training import current as current_training
from stagescope_workers.integrations.patches import (
    Function,
    Patch,
    Wrap,
    after,
    ending,
    guarded,
    wrapper,
)
from stagescope_workers.integrations.training import alive, closed_at_end

_in_original: Final[contextvars.ContextVar[bool]] = contextvars.ContextVar(
    "stagescope_nexrl_in_original", default=False
)
_Reporter = TypeVar("_Reporter")
_OF_TRAINER: Final = frozenset(
    {"trajectory", "prepared_trajectories", "datums", "training_metrics"}
)
_OF_RANK: Final = frozenset({"forward_data", "loss"})


@wrapper
def wrap_should_dump(
    function: Function, dumper: object, data_type: str, step: int, *args: Any, **kwargs: Any
) -> object:
    """Wrap `should_dump(data_type, step)`."""
    answer = function(dumper, data_type, step, *args, **kwargs)
    if answer or _in_original.get():
        return answer
    with guarded("what NexRL dumps"):
        if _is_reported(data_type):
            return True
    return answer


def _is_reported(data_type: str) -> bool:
    if data_type in _OF_TRAINER:
        return current_training() is not None
    return data_type in _OF_RANK and ranks.current() is not None


def _reporting(
    current: Callable[[], _Reporter | None],
    report: Callable[[_Reporter, dict[str, Any]], None],
    *names: str,
) -> Wrap:
    """Wrap a `dump_...`: `report` gets what is current, and the arguments by name."""

    @wrapper
    def wrap(function: Function, dumper: object, *args: object, **kwargs: object) -> object:
        with guarded(f"{function.__name__} of NexRL"):
            found = current()
            if found is not None:
                report(found, {**dict(zip(names, args, strict=False)), **kwargs})
        token = _in_original.set(True)
        try:
            return function(dumper, *args, **kwargs)
        finally:
            _in_original.reset(token)

    return wrap


wrap_trajectory = _reporting(
    current_training, lambda found, given: found.observe(given["trajectories"]),
    "step", "trajectories",
)  # fmt: skip
wrap_prepared = _reporting(
    current_training, lambda found, given: found.note_prepared(given["trajectories"]),
    "step", "trajectories", "advantages", "extra_info",
)  # fmt: skip
wrap_datums = _reporting(
    current_training, lambda found, given: found.begin_remote_update(given["datums_data"]),
    "step", "datums_data", "extra_info",
)  # fmt: skip
wrap_metrics = _reporting(
    current_training, lambda found, given: found.end_remote_update(given["metrics"]),
    "step", "metrics", "extra_info",
)  # fmt: skip
wrap_forward_data = _reporting(
    ranks.current, ranks.Update.record_forward,
    "step", "micro_idx", "log_probs", "entropy", "response_mask", "input_ids", "extra_info",
)  # fmt: skip
wrap_loss = _reporting(
    ranks.current, ranks.Update.log_loss,
    "step", "micro_idx", "loss", "pg_loss", "entropy_loss", "metrics", "extra_info",
)  # fmt: skip


_UPDATES: Final = ("update_actor", "update_actor_with_distillation")
_OLD: Final = "actor_compute_log_prob"


@after("the steps of a trainer")
def wrap_base_init(result: None, trainer: Trainer, *args: object, **kwargs: object) -> None:
    """Wrap `BaseTrainer.__init__`: each trainer's own `train` is a step."""
    # On the object, since each kind of trainer has a `train` of its own.
    trainer.train = _wrap_train(trainer, trainer.train)


def _wrap_train(trainer: Trainer, train: Function) -> Function:
    held = weakref.ref(trainer)

    @functools.wraps(train)
    def run(trajectories: Sequence[Trajectory], *args: object, **kwargs: object) -> object:
        found: Training | None = None
        step = 0
        with guarded("a step"):
            found = training(alive(held))
            step = found.step
        if found is None:
            return train(trajectories, *args, **kwargs)
        with found.entered(trajectories):
            result = train(trajectories, *args, **kwargs)
        with guarded("scalars"):
            return found.report(step, result)
        return result

    return run


@wrapper
def wrap_get_trajectories(
    function: Function, trainer: Trainer, *args: Any, **kwargs: Any
) -> object:
    """Wrap `BaseTrainer._get_trajectories`, which is called until there are enough of them."""
    with guarded("rollout_generate"):
        training(trainer).begin("rollout_generate")
    trajectories = function(trainer, *args, **kwargs)
    if trajectories is not None:
        with guarded("the trajectories of a step"):
            training(trainer).observe(trajectories)
    return trajectories


@wrapper
def wrap_main_loop(function: Function, trainer: Trainer, *args: Any, **kwargs: Any) -> object:
    """Wrap `BaseTrainer._main_loop`: when it ends, everything that waits is sent."""
    with closed_at_end(lambda error: training(trainer).close(error)):
        return function(trainer, *args, **kwargs)


@after("the calls of the train service")
def wrap_self_hosted_init(result: None, trainer: Trainer, *args: object, **kwargs: object) -> None:
    """Wrap `SelfHostedTrainer.__init__`: the calls of its train service are stages."""
    client, held = trainer._train_service_client, weakref.ref(trainer)
    # On the object: NexRL has several kinds of clients, and a test has another.
    for name in _UPDATES:
        if hasattr(client, name):
            setattr(client, name, _wrap_update(held, getattr(client, name)))
    client.compute_log_prob = _wrap_log_prob(held, client.compute_log_prob)
    client.save_checkpoint = _wrap_save(held, client.save_checkpoint)


def _told(found: Training, data: Mapping[str, Any]) -> Mapping[str, object]:
    """Return a batch for the train service whose `meta_info` names the run and the step."""
    if not isinstance(data, Mapping):
        return data
    return {**data, "meta_info": {**(data.get("meta_info") or {}), CONTEXT: found.context()}}


def _wrap_update(held: weakref.ref[Trainer], call: Function) -> Function:
    @functools.wraps(call)
    def run(batch: Mapping[str, Any], *args: object, **kwargs: object) -> object:
        found: Training | None = None
        given = batch
        with guarded("actor_update"):
            found = training(alive(held))
            found.begin("actor_update")
            given = _told(found, batch)
            found.record_update(batch)
        with ending("actor_update", functools.partial(_end, found, "actor_update")):
            return call(given, *args, **kwargs)

    return run


def _end(found: Training | None, name: str, error: BaseException | None) -> None:
    if found is not None:
        found.end(name, error)


def _wrap_log_prob(held: weakref.ref[Trainer], call: Function) -> Function:
    @functools.wraps(call)
    def run(batch: Mapping[str, object], *args: object, **kwargs: object) -> object:
        given = batch
        with guarded("telling the ranks the step"):
            given = _told(training(alive(held)), batch)
        return call(given, *args, **kwargs)

    return run


def _wrap_save(held: weakref.ref[Trainer], call: Function) -> Function:
    """Wrap `save_checkpoint`: with `save_weight_only` it writes what the engines load next."""

    @functools.wraps(call)
    def run(*args: object, **kwargs: object) -> object:
        found: Training | None = None
        with guarded("weight_sync"):
            if kwargs.get("save_weight_only"):
                found = training(alive(held))
                found.begin("weight_sync")
        with ending("weight_sync", functools.partial(_end, found, "weight_sync")):
            return call(*args, **kwargs)

    return run


@wrapper
def wrap_old_log_probs(
    function: Function, trainer: Trainer, batch: Batch, *args: Any, **kwargs: Any
) -> object:
    """Wrap `_compute_old_log_probs(batch)`: both streams of the step meet here."""
    found: Training | None = None
    with guarded(_OLD):
        found = training(trainer)
        found.begin(_OLD)
    with ending(_OLD, functools.partial(_end, found, _OLD)):
        old = function(trainer, batch, *args, **kwargs)
        with guarded("the step's log-probs"):
            if found is not None:
                found.record_old(batch, old)
    return old


@after("the rows of an update")
def wrap_prepare_batch(result: Any, trainer: Trainer, *args: object, **kwargs: object) -> None:
    """Wrap `_prepare_batch(batch)`, which returns the rows in the order of the update."""
    training(trainer).note_batch(result[0])


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
    (_BASE, "__init__", wrap_base_init, "steps and scalars"),
    (_BASE, "_get_trajectories", wrap_get_trajectories,
     "rollout_generate: trajectories, rewards, the rollout's log-probs"),
    (_BASE, "_main_loop", wrap_main_loop, "the end of a training"),
    (_SELF_HOSTED, "__init__", wrap_self_hosted_init,
     "actor_update and weight_sync of the trainer, and the ranks' step"),
    (_GRPO, "_compute_old_log_probs", wrap_old_log_probs,
     "actor_compute_log_prob: both streams"),
    (_GRPO, "_prepare_batch", wrap_prepare_batch, "advantages"),
    (_DISTILLATION, "_compute_old_log_probs", wrap_old_log_probs,
     "actor_compute_log_prob of the distillation"),
    (_DISTILLATION, "_prepare_batch", wrap_prepare_batch,
     "the rows of the distillation"),
    (_DUMPER, "should_dump", wrap_should_dump, "being called with what is not dumped"),
    (_DUMPER, "dump_trajectory", wrap_trajectory, "trajectories of an own trainer"),
    (_DUMPER, "dump_forward_data", wrap_forward_data, "log-probs of each part of an update"),
    (_DUMPER, "dump_loss", wrap_loss, "loss of each part of an update"),
    (_DUMPER, "dump_prepared_trajectories", wrap_prepared,
     "advantages of the remote API mode"),
    (_DUMPER, "dump_datums", wrap_datums, "datums of the remote API mode"),
    (_DUMPER, "dump_training_metrics", wrap_metrics, "metrics of the remote API mode"),
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

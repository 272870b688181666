"""Wraps what NexRL's trainers call: their loop, their preparation of a batch, the train service."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stagescope_workers.integrations.guard import ending, guarded
from stagescope_workers.integrations.nexrl.rows import Trajectory
from stagescope_workers.integrations.nexrl.training import (
    CONTEXT,
    Batch,
    Trainer,
    Training,
    training,
)
from stagescope_workers.integrations.patches import Function
from stagescope_workers.integrations.training import alive, closed_at_end

_UPDATES: Final = ("update_actor", "update_actor_with_distillation")
_OLD: Final = "actor_compute_log_prob"


def wrap_base_init(function: Function) -> Function:
    """Wrap `BaseTrainer.__init__`: each trainer's own `train` is a step."""

    @functools.wraps(function)
    def run(trainer: Trainer, *args: object, **kwargs: object) -> None:
        function(trainer, *args, **kwargs)
        with guarded("the steps of a trainer"):
            # On the object, since each kind of trainer has a `train` of its own.
            trainer.train = _wrap_train(trainer, trainer.train)

    return run


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


def wrap_get_trajectories(function: Function) -> Function:
    """Wrap `BaseTrainer._get_trajectories`, which is asked until there are enough of them."""

    @functools.wraps(function)
    def run(trainer: Trainer, *args: object, **kwargs: object) -> object:
        with guarded("rollout_generate"):
            training(trainer).begin("rollout_generate")
        trajectories = function(trainer, *args, **kwargs)
        if trajectories is not None:
            with guarded("the trajectories of a step"):
                training(trainer).observe(trajectories)
        return trajectories

    return run


def wrap_main_loop(function: Function) -> Function:
    """Wrap `BaseTrainer._main_loop`: when it ends, everything that waits is sent."""

    @functools.wraps(function)
    def run(trainer: Trainer, *args: object, **kwargs: object) -> object:
        with closed_at_end(lambda error: training(trainer).close(error)):
            return function(trainer, *args, **kwargs)

    return run


def wrap_self_hosted_init(function: Function) -> Function:
    """Wrap `SelfHostedTrainer.__init__`: the calls of its train service are stages."""

    @functools.wraps(function)
    def run(trainer: Trainer, *args: object, **kwargs: object) -> None:
        function(trainer, *args, **kwargs)
        with guarded("the calls of the train service"):
            client, held = trainer._train_service_client, weakref.ref(trainer)
            # On the object: NexRL has several kinds of clients, and a test has another.
            for name in _UPDATES:
                if hasattr(client, name):
                    setattr(client, name, _wrap_update(held, getattr(client, name)))
            client.compute_log_prob = _wrap_log_prob(held, client.compute_log_prob)
            client.save_checkpoint = _wrap_save(held, client.save_checkpoint)

    return run


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


def wrap_old_log_probs(function: Function) -> Function:
    """Wrap `_compute_old_log_probs(batch)`: both streams of the step meet here."""

    @functools.wraps(function)
    def run(trainer: Trainer, batch: Batch, *args: object, **kwargs: object) -> object:
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

    return run


def wrap_prepare_batch(function: Function) -> Function:
    """Wrap `_prepare_batch(batch)`, which returns the rows in the order of the update."""

    @functools.wraps(function)
    def run(trainer: Trainer, *args: object, **kwargs: object) -> object:
        result = function(trainer, *args, **kwargs)
        with guarded("the rows of an update"):
            training(trainer).note_batch(result[0])
        return result

    return run

"""The ranks of NexRL's train service: the parts of their updates.

NexRL gives `dump_forward_data` and `dump_loss` a `micro_idx` that restarts in every mini-batch and
epoch. `compute_log_prob` and the distillation never give one, so NexRL's files keep only the last
writer of each number. Here events count the parts: a forward pass is a micro-batch, an optimizer
step is a mini-batch, and an epoch is a fixed number of mini-batches.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stagescope_workers.integrations.nexrl.training import CONTEXT
from stagescope_workers.integrations.patches import (
    Function,
    after,
    before,
    ending,
    guarded,
    staged,
    wrapper,
)
from stagescope_workers.integrations.training import scalars
from stagescope_workers.probe.lifecycle import init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

if TYPE_CHECKING:
    import torch

_probes: Final[dict[tuple[int, str, str | None], Probe]] = {}
_LOSSES: Final = ("loss", "pg_loss", "entropy_loss")


Actor: TypeAlias = Any
"""Attributes read from NexRL's `DataParallelPPOActor`: actor_module, config, _rank."""
Batch: TypeAlias = Any
"""Attributes read from the batch that a rank is sent: batch."""


class Update:
    """The parts of one update of a rank.

    A part begins with its forward pass and ends where the next begins, so the optimizer's step is
    in the last part of its mini-batch.

    Args:
        probe: The rank's probe.
        step: The trainer's step.
        model: The module, for captures.
        minibatches: How many are in an epoch; None where that is unknown.
    """

    def __init__(self, probe: Probe, step: int, *, model: object, minibatches: int | None) -> None:
        self._probe = probe
        self._step = step
        self._model = model
        self._minibatches = minibatches
        self._minibatch = 0
        self._microbatch = 0
        self._stage: Stage | None = None

    @property
    def part(self) -> dict[str, int]:
        """Epoch, mini-batch and micro-batch of the next forward pass."""
        size = self._minibatches
        epoch, minibatch = divmod(self._minibatch, size) if size else (0, self._minibatch)
        return {"epoch": epoch, "minibatch": minibatch, "microbatch": self._microbatch}

    def begin_forward(self) -> None:
        """Begin the part of a micro-batch."""
        self.end()
        part = self.part
        self._microbatch += 1
        self._stage = self._probe.begin(
            "actor_update",
            step=self._step,
            policy_version=self._step,
            model=self._model,
            **part,
        )

    def end_minibatch(self) -> None:
        """Count a step of the optimizer."""
        self._minibatch += 1
        self._microbatch = 0

    def record_forward(self, given: Mapping[str, torch.Tensor]) -> None:
        """Record what `dump_forward_data` is given."""
        stage = self._stage
        if stage is None:
            return
        mask, log_probs = given["response_mask"], given["log_probs"].detach()
        ids = given.get("input_ids")
        width = mask.shape[-1]
        payload = {"response_mask": mask, "log_probs": log_probs}
        if ids is not None:
            payload["responses"] = ids[:, -width:]
            if stage.wants("input_ids"):
                payload["input_ids"] = ids
        if stage.wants("entropy"):
            payload["entropy"] = given["entropy"].detach()
        stage.record(payload)

    def log_loss(self, given: Mapping[str, Any]) -> None:
        """Report the numbers that `dump_loss` is given."""
        if self._stage is not None:
            metrics = {
                name: value.item() if getattr(value, "numel", lambda: 0)() == 1 else value
                for name, value in (given.get("metrics") or {}).items()
            }
            numbers = {name: given[name] for name in _LOSSES if name in given}
            self._stage.log(**scalars({**metrics, **numbers}))

    def end(self, error: BaseException | None = None) -> None:
        """End the part that runs, if there is one."""
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.end(error)


_current: Final[contextvars.ContextVar[Update | None]] = contextvars.ContextVar(
    "stagescope_nexrl_update", default=None
)


def current() -> Update | None:
    """Return the update that the caller runs in, or None."""
    return _current.get()


@wrapper
def wrap_update(function: Function, actor: Actor, data: Batch, *args: Any, **kwargs: Any) -> object:
    """Wrap `DataParallelPPOActor.update_policy(data)`, or the distillation's."""
    update: Update | None = None
    with guarded("the parts of an update"):
        update = _update(actor, data)
    with _entered(update):
        return function(actor, data, *args, **kwargs)


@contextlib.contextmanager
def _entered(update: Update | None) -> Iterator[None]:
    token = _current.set(update)

    def end(error: BaseException | None) -> None:
        _current.reset(token)
        if update is not None:
            update.end(error)

    with ending("the parts of an update", end):
        yield


@staged("actor_compute_log_prob")
def wrap_log_prob(actor: Actor, data: Batch, *args: object, **kwargs: object) -> Stage | None:
    """Wrap `DataParallelPPOActor.compute_log_prob(data)`.

    It is timed alone: the trainer's process records its result, with the rollout's log-probs.
    """
    told = _told(data)
    if told is None:
        return None
    step = int(told["step"])
    return _probe(actor, told).stage(
        "actor_compute_log_prob", step=step, policy_version=step, model=actor.actor_module
    )


@before("the parts of an update")
def wrap_forward(*args: object, **kwargs: object) -> None:
    """Wrap `_forward_micro_batch`: in an update it begins a part."""
    update = current()
    if update is not None:
        update.begin_forward()


@after("the parts of an update")
def wrap_optimizer_step(*args: object, **kwargs: object) -> None:
    """Wrap `_optimizer_step`, which ends a mini-batch."""
    update = current()
    if update is not None:
        update.end_minibatch()


def _told(data: object) -> Mapping[str, Any] | None:
    found = (getattr(data, "meta_info", None) or {}).get(CONTEXT)
    return found if isinstance(found, Mapping) else None


def _update(actor: Actor, data: Batch) -> Update | None:
    told = _told(data)
    if told is None:
        return None
    size = int(actor.config.get("ppo_mini_batch_size") or 0)
    rows = int(data.batch.batch_size[0])
    return Update(
        _probe(actor, told),
        int(told["step"]),
        model=actor.actor_module,
        minibatches=math.ceil(rows / size) if size > 0 and rows > 0 else None,
    )


def _probe(actor: Actor, told: Mapping[str, Any]) -> Probe:
    key = (os.getpid(), str(told["run"]), told.get("attempt_key"))
    probe = _probes.get(key)
    if probe is None:
        probe = _probes[key] = init(
            str(told["run"]),
            role="actor",
            rank=int(actor._rank),
            world_size=_world_size(),
            attempt_key=told.get("attempt_key"),
            keep=told.get("keep"),
            **_layout(actor),
        )
    return probe


def _layout(actor: Actor) -> dict[str, Any]:
    """Return the rank's coordinates: those of a sequence-parallel group hold the same rows."""
    layout: dict[str, object] = {"framework": "nexrl", "engine": "fsdp"}
    size = int(getattr(actor, "ulysses_sequence_parallel_size", 1) or 1)
    rank = int(actor._rank)
    if size > 1:
        layout |= {"sp_size": size, "sp_rank": rank % size}
    return {"layout": {**layout, "dp_rank": rank // size}, "data_rank": rank // size}


def _world_size() -> int | None:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_world_size())
    value = os.environ.get("WORLD_SIZE", "")
    return int(value) if value.isdecimal() else None

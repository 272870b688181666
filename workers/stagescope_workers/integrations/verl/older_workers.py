"""verl 0.7's workers of an older kind, a class for each role: their stages, each as a whole.

They take a DataProto and go through its mini-batches by themselves: an update has one part, and
its loss is another one, so that the log-probs of bypass mode are not reported.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from stagescope_workers.integrations.verl import context as contexts
from stagescope_workers.integrations.verl import ranks
from stagescope_workers.integrations.verl.guard import guarded

_log = logging.getLogger("stagescope.verl")

Function = Callable[..., Any]

_has_said_bypass = False


def engine_of(name: str) -> Callable[[Any], Any]:
    """Return a function that finds a worker's model, by the names of FSDP's and Megatron's."""

    def find(worker: Any) -> Any:
        model = getattr(worker, f"{name}_module_fsdp", getattr(worker, f"{name}_module", None))
        return types.SimpleNamespace(module=model)

    return find


def run_update_actor(function: Function) -> Function:
    """Return `update_actor` as one stage; says once what bypass mode leaves out."""
    as_stage = ranks.run_forward("actor_update", "actor", engine_of("actor"), function)

    def run(worker: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        with guarded("the log-probs of bypass mode"):
            _say_bypass(data)
        return as_stage(worker, data, *args, **kwargs)

    return run


def _say_bypass(data: Any) -> None:
    global _has_said_bypass
    context = contexts.find(data)
    if context is not None and context.bypass and not _has_said_bypass:
        _has_said_bypass = True
        _log.warning(
            "not reported with this version: the log-probs of bypass mode; "
            "trainer.use_legacy_worker_impl=disable has them"
        )


def _forward(stage: str, role: str, name: str) -> Callable[[Function], Function]:
    return partial(ranks.run_forward, stage, role, engine_of(name))


CALLS: Final[dict[str, tuple[Callable[[Function], Function], str]]] = {
    "ActorRolloutRefWorker.compute_log_prob": (
        _forward("actor_compute_log_prob", "actor", "actor"),
        "actor_compute_log_prob",
    ),
    "ActorRolloutRefWorker.compute_ref_log_prob": (
        _forward("ref_compute_log_prob", "ref", "ref"),
        "ref_compute_log_prob",
    ),
    "ActorRolloutRefWorker.update_actor": (run_update_actor, "actor_update"),
    "AsyncActorRolloutRefWorker.update_weights": (
        partial(ranks.run_update_weights, engine_of("actor")),
        "weight_sync",
    ),
    "CriticWorker.compute_values": (
        _forward("compute_values", "critic", "critic"),
        "compute_values",
    ),
    "CriticWorker.update_critic": (
        _forward("critic_update", "critic", "critic"),
        "critic_update",
    ),
}
"""Method -> what stands round it, and the stage."""

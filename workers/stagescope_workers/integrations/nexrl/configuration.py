"""What a NexRL trainer's configuration says: the run's name, the engine, and how it samples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from stagescope_workers.integrations.configuration import (
    lookup,
    named_run,
    to_container,
    visible_leaves,
)

_MOCK: Final = "mock"


def root(config: Any) -> Any:
    """Return the whole configuration: a NexRL module gets a part of it, which knows its parent."""
    while True:
        parent = getattr(config, "_parent", None)
        if parent is None:
            return config
        config = parent


def run_name(config: Any) -> str:
    """Return the run's name: NexRL's `experiment_name`, unless STAGESCOPE_RUN names it."""
    whole = root(config)
    name = lookup(whole, "experiment_name") or lookup(whole, "project_name") or ""
    return named_run(str(name), fallback="nexrl")


def attempt_key() -> str | None:
    """Return STAGESCOPE_ATTEMPT; None means Ray's session and job."""
    return os.environ.get("STAGESCOPE_ATTEMPT") or None


def settings(config: Any) -> dict[str, object]:
    """Return the whole configuration without what may be secret."""
    tree = to_container(root(config))
    return visible_leaves(tree) if isinstance(tree, Mapping) else {}


def is_mock(config: Any) -> bool:
    """Return whether the rollouts are synthetic, or replayed from a dump."""
    return bool(lookup(root(config), "rollout_worker", "type") == _MOCK)


def streams(config: Any, *, has_rollout: bool, temperature: Any = None) -> dict[str, object]:
    """Return who produced the streams of a batch.

    Args:
        config: Of the trainer.
        has_rollout: Whether the batch has the rollout's stream.
        temperature: By which the batch was sampled.
    """
    whole = root(config)
    engine = (
        lookup(whole, "service", "inference_service", "backend")
        or lookup(config, "algorithm", "inference_service", "backend")
        or lookup(whole, "rollout_worker", "inference_service", "backend")
        or "engine"
    )
    if is_mock(config):
        path = lookup(whole, "rollout_worker", "trajectory_load_path")
        engine = "replay" if path else _MOCK
    own = {"producer": "trainer", "engine": "fsdp"}
    sampling = {} if temperature is None else {"temperature": float(temperature)}
    found: dict[str, object] = {"old": own, "current": own}
    if has_rollout:
        found["rollout"] = {"producer": str(engine), "engine": str(engine), **sampling}
    return {"streams": found}

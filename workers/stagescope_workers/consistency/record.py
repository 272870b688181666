"""Records a comparison as a step of a run, through a probe like any rank's."""

from __future__ import annotations

import sys
import uuid

import numpy as np

from stagescope import discovery
from stagescope.wire.errors import Unreachable
from stagescope_workers.consistency.comparison import EngineComparison
from stagescope_workers.probe.lifecycle import init

STAGE = "rollout_generate"
ROLE = "rollout"


def record(
    found: EngineComparison, *, run: str, step: int, timeout: float = 60.0, url: str | None = None
) -> bool:
    """Record a comparison as a step of the role `rollout`; return whether it was received.

    It is sent over Ray where this process has joined it, else over HTTP to the service that
    `stagescope.attach` would find. Each call is a new attempt.

    Raises:
        Unreachable: no service is known here.
        InvalidInput: an invalid run name.
    """
    service = discovery.find(url) if url is not None or not _in_ray() else None
    probe = init(
        run=run,
        role=ROLE,
        rank=0,
        world_size=1,
        attempt_key=f"consistency-{uuid.uuid4().hex}",
        layout={"engine": found.engine.kind, "engine_version": found.engine.version},
        settings={"engine": found.engine.place, "against": found.other.place},
        keep={"what": ["trajectories", "old_log_probs"]},  # to be compared or scored again
        captures=False,
        watchdog=0,
        strict=True,
        url=None if service is None else service.url,
        token=None if service is None else service.operate_token,
    )
    with probe.stage(STAGE, step=step) as stage:
        stage.record(_payload(found))
        stage.log(**_scalars(found))
    probe.end_step(step)
    return probe.close(timeout)


def _in_ray() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _payload(found: EngineComparison) -> dict[str, object]:
    rows = found.rows
    optional: dict[str, object] = {}
    if all(row.group is not None for row in rows):
        optional["group_ids"] = [row.group for row in rows]
    if all(row.reward is not None for row in rows):
        optional["rewards"] = np.array([row.reward for row in rows], np.float32)
    return {
        **optional,
        "rollout_log_probs": [row.q.astype(np.float32) for row in rows],
        "old_log_probs": [row.p.astype(np.float32) for row in rows],
        "response_mask": [row.counted.astype(np.int8) for row in rows],
        "responses": [np.array(row.ids, np.int64) for row in rows],
        "prompts": [np.array(row.prompt, np.int64) for row in rows],
        "sample_ids": [row.name for row in rows],
        "streams": {name: dict(stream) for name, stream in found.streams.items()},
        "left_out": dict(found.left_out),
    }


def _scalars(found: EngineComparison) -> dict[str, float]:
    scalars: dict[str, float] = {
        "consistency/left_out": float(len(found.left_out)),
        "consistency/checks_failed": float(sum(check.ok is False for check in found.checks)),
    }
    if (agreement := found.agreement) is not None:
        scalars["consistency/same_answers"] = float(agreement.same)
        scalars["consistency/token_share"] = agreement.token_share
        if (accuracy := agreement.accuracy) is not None:
            scalars["consistency/engine_accuracy"] = accuracy[0]
            scalars["consistency/other_accuracy"] = accuracy[1]
    return scalars


def reason_against_recording(url: str | None) -> str | None:
    """Return why nothing can be recorded; None where a service is known."""
    if url is None and _in_ray():
        return None
    try:
        discovery.locate(url)
    except Unreachable as error:
        return error.wrong
    return None

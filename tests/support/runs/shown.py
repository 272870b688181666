"""A training to look at: two attempts of 40 steps, with what goes wrong in trainings.

The mismatch grows with the round; rank 3 is apart from the restart on; rank 5 hands over NaN at
`BROKEN`; a capture of it is armed and arrives.
"""

from __future__ import annotations

import hashlib
import math
import time
from typing import Any, Final

import numpy as np
from tests.support.api import Rank, Service
from tests.support.measure import Handed

from stagescope_service.ingest.reader import PayloadReader
from stagescope_service.store.ring import Ring
from stagescope_wire.tensorfile import WireTensor

LOG_PROB: Final = "actor_compute_log_prob"
RUN: Final = "qwen3-8b-countdown"
RESTART: Final = 24
"""The first attempt dies in this step; the second resumes after `RESUMED`."""
RESUMED: Final = 20
BROKEN: Final = 33
HOT_RANK: Final = 3
NAN_RANK: Final = 5
SECONDS: Final = 60.0
"""Of a step."""


def payload(
    step: int, rank: int, *, rows: int = 4, rounds: int = 4, tokens: int = 96, scale: float = 1.0
) -> Handed:
    """Rows of `rounds` rounds with environment tokens between them, noisier in later rounds."""
    random = np.random.default_rng([step, rank])
    size = rounds * tokens
    q = -random.exponential(0.7, (rows, size)).astype(np.float32)
    of_round = np.repeat(np.arange(rounds), tokens)
    noise = 0.004 * scale * (1.0 + of_round) * (1.0 + 0.01 * step)
    d = random.normal(0.0, 1.0, (rows, size)) * noise
    spikes = random.random((rows, size)) < 0.0008
    d += spikes * random.normal(0.0, 1.2, (rows, size))
    p = np.minimum(q + d, 0.0).astype(np.float32)
    mask = np.ones((rows, size), np.int64)
    for at in range(1, rounds):
        mask[:, at * tokens : at * tokens + 8] = 0
    tensors: dict[str, WireTensor] = {
        "old_log_probs": ("float32", p.shape, p, None),
        "rollout_log_probs": ("float32", q.shape, q, None),
        "response_mask": ("int64", mask.shape, mask, None),
        "responses": ("int64", mask.shape, random.integers(0, 150_000, mask.shape), None),
    }
    ids = [f"g{step}-{rank}-{row // 2}/{row % 2}" for row in range(rows)]
    return {"schema": 1, "tensors": tensors, "strings": {"sample_ids": ids}, "meta": {}}


def loss(streams: Handed, step: int, rank: int) -> Handed:
    """What the loss did with a payload's tokens: a rejected row, clipped tokens, no advantage."""
    random = np.random.default_rng([step, rank, 1])
    p, q = (streams["tensors"][f"{name}_log_probs"][2] for name in ("old", "rollout"))
    mask = streams["tensors"]["response_mask"][2].copy()
    d = np.nan_to_num(p - q)
    mask[np.abs(d) > 1.0] = 0
    clipped = np.where(d > 0.05, 1, np.where(d < -0.05, -1, 0)).astype(np.int8)
    advantages = np.ones_like(p) * random.normal(0.0, 1.0, (len(p), 1)).astype(np.float32)
    advantages[-1] = 0.0
    tensors: dict[str, WireTensor] = {
        "response_mask": ("int64", mask.shape, mask, None),
        "advantages": ("float32", advantages.shape, advantages, None),
        "clipped": ("int8", clipped.shape, clipped, None),
        "rollout_is_weights": ("float32", d.shape, np.exp(np.clip(d, -1, 0.2)).astype("f4"), None),
    }
    return {"schema": 1, "tensors": tensors, "strings": streams["strings"], "meta": {}}


def keep_tensors(live: Service) -> None:
    """Let the service keep what ranks hand over in its ring, as a service with a disk does."""
    data = live.settings.data_path
    ring = Ring(data / "ring" / "here", 1 << 30, reserve_bytes=0)
    live.engine.read_with(PayloadReader(data, "here", ring))


class ShownRun:
    """Feeds a service step by step.

    Args:
        live: the service.
        ranks: of the actor.
        start: Unix seconds of the first event; default: so long ago that it ends now.
        size: further arguments of `payload`.
    """

    def __init__(
        self, live: Service, *, ranks: int = 8, steps: int = 40, start: float | None = None,
        **size: int,
    ) -> None:  # fmt: skip
        self.live = live
        self.size = size
        self.ranks = ranks
        self.start = time.time() - steps * SECONDS * 1.2 if start is None else start
        self.is_resumed = False
        self.actors = self._begin("one", 0)

    def _begin(self, key: str, resumed: int) -> list[Rank]:
        fields: dict[str, Any] = {"resumed_from_step": resumed} if resumed else {}
        return [
            Rank(
                self.live, run=RUN, rank=rank, key=key, world_size=self.ranks, start=self.start,
                layout={
                    "host": f"node-{rank // 4}", "device_kind": "npu", "device_index": rank % 4,
                    "dp_rank": rank // 2, "dp_size": self.ranks // 2, "tp_rank": rank % 2,
                    "tp_size": 2, "framework": "verl", "framework_version": "0.9.1",
                },
                fingerprint={
                    "git": {"commit": hashlib.sha1(key.encode()).hexdigest()},
                    "packages": {"torch": "2.13.0"},
                    "config": {"lr": 1e-6 if key == "one" else 2e-6},
                },
                **fields,
            )
            for rank in range(self.ranks)
        ]  # fmt: skip

    def train(self, first: int, last: int) -> None:
        """Do the steps from `first` to `last`, and begin the one after."""
        for step in range(first, last + 1):
            self.do(step)
        for actor in self.actors:
            actor.begin("rollout_generate", last + 1)

    def do(self, step: int) -> None:
        """Do one step."""
        for actor in self.actors:
            actor.clock = self.start + step * SECONDS
        for rank, actor in enumerate(self.actors):
            actor.stage("rollout_generate", step, seconds=30.0 + rank)
        for rank, actor in enumerate(self.actors):
            is_hot = rank == HOT_RANK and self.is_resumed
            handed = payload(step, rank, scale=4.0 if is_hot else 1.0, **self.size)
            if step == BROKEN and rank == NAN_RANK:
                handed["tensors"]["old_log_probs"][2][1, 40:43] = math.nan
            actor.stage(LOG_PROB, step, handed, seconds=8.0 + 0.1 * rank)
            value = math.nan if step == BROKEN and rank == NAN_RANK else 0.1 + 0.01 * rank
            scalars = {"loss": value, "grad_norm": 1.0 + 0.1 * rank, "reward": 0.4 + 0.005 * step}
            seen = loss(handed, step, rank)
            actor.stage("actor_update", step, seen, seconds=12.0, scalars=scalars)

    def restart(self) -> None:
        """Let every process die inside `RESTART`, and resume after `RESUMED`."""
        for actor in self.actors:
            self.live.engine.fall_silent(actor)
        self.start += 4 * SECONDS
        self.is_resumed = True
        self.actors = self._begin("two", RESUMED)

    def capture(self) -> str:
        """Arm a capture of the next steps, which every rank but the last acknowledges."""
        body = {
            "run": RUN, "stages": ["actor_update"], "ranks": "all", "steps": {"next": 2},
            "task": "statistics", "level": "L1", "late": "go_on", "timeout": 3600,
        }  # fmt: skip
        answer = self.live.operate.post("/captures?wait=0", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["capture_id"])

    def acknowledge(self, capture_id: str, ranks: range) -> None:
        """Let ranks have the capture in force and say what it may cost."""
        for rank in ranks:
            self.actors[rank].acknowledge()
            self.actors[rank].say(
                "dump", stage="actor_update", capture_id=capture_id, state="estimated",
                estimate={"bytes": 3_000_000, "seconds": 0.4, "basis": "model"},
            )  # fmt: skip

    def dump(self, capture_id: str, step: int, rank: int, state: str = "complete") -> None:
        """Let a rank report its dump of a step."""
        error = "msprobe: no space left on device" if state == "failed" else None
        self.actors[rank].say(
            "dump", stage="actor_update", step=step, capture_id=capture_id, state=state,
            path=f"/data/dumps/step_{step}/actor_update/rank{rank}", bytes=2_900_000 + rank,
            files=3, seconds=0.41, task="statistics", level="L1", error=error,
        )  # fmt: skip


def shown(live: Service, steps: int = 40, **size: int) -> ShownRun:
    """Feed the whole training; returns it in its last step."""
    training = ShownRun(live, steps=steps, **size)
    training.train(1, min(RESTART - 1, steps))
    if steps > RESTART:
        training.restart()
        training.train(RESUMED + 1, steps)
    return training

"""Many runs in one catalogue, in the time that writing their rows takes.

Two runs are trained through the real coordinator, one of them with a large mismatch. The others are
copies of their rows.
"""

from __future__ import annotations

from typing import Final

from tests.support.api import Rank, Service
from tests.support.measure import payload
from tests.support.stores import rows_of

from stagescope_service.store.contract import Put

RANKS: Final = 8
STEPS: Final = 40
NOISES: Final = (0.004, 0.4)
"""Of the trained runs: nats by which their log-probs differ."""
_COPIED: Final = (
    "runs", "attempts", "processes", "steps", "step_metrics", "stages", "scalars", "findings",
)  # fmt: skip
_GROUP: Final = 40
"""Runs of a transaction."""


def crowd(live: Service, runs: int) -> None:
    """Fill a service with so many runs of 8 ranks and 40 steps; every second one is sick."""
    names = [_trained(live, f"run-{at:04}", noise) for at, noise in enumerate(NOISES)]
    attempts = {row["run"]: row["attempt_id"] for row in rows_of(live.store, "attempts")}
    rows = [
        [
            (table, row)
            for table in _COPIED
            for row in rows_of(live.store, table)
            if row.get("attempt_id", attempts[name]) == attempts[name]
            and row.get("run", name) == name
        ]
        for name in names
    ]
    first = max(attempts.values()) + 1
    for begin in range(len(names), runs, _GROUP):
        puts = []
        for at in range(begin, min(begin + _GROUP, runs)):
            own = {"run": f"run-{at:04}", "attempt_id": first + at}
            for table, row in rows[at % len(names)]:
                copied = {**row, **{name: own[name] for name in own if name in row}}
                for name in {"incarnation", "finding_id"} & row.keys():
                    copied[name] = f"{row[name]}-{at}"
                puts.append(Put(table, copied))
        live.store.submit(puts).result(600)


def _trained(live: Service, run: str, noise: float) -> str:
    ranks = [
        Rank(live, run=run, rank=rank, world_size=RANKS, greets=False) for rank in range(RANKS)
    ]
    live.engine.take_together([rank.hello for rank in ranks])
    for step in range(1, STEPS + 1):
        live.engine.take_together([
            rank.draft_stage(
                "actor_compute_log_prob", step,
                payload(4, 32, seed=RANKS * step + at, noise=noise, first_sample=4 * at),
                scalars={"reward": 0.3 + 0.01 * step, "loss": 1.0 / step},
            )
            for at, rank in enumerate(ranks)
        ])  # fmt: skip
    for rank in ranks:
        rank.say("finish")
    return run

"""A series, and which steps are exact, over 10 000 steps against asking step by step.

    python -m tests.benchmarks.bench_series [STEPS]

Needs neither Ray nor a GPU; a service in this process, its SQLite below a temporary directory.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.api import Rank, Service, service
from tests.support.measure import payload
from tests.support.stores import rows_of

from stagescope_service.statistics.summarise import warm
from stagescope_service.store.contract import Put

STAGE = "actor_compute_log_prob"
METRIC = "rollout_corr/k3_kl"
RANKS = 8
SINGLE = 50
"""Steps that are asked one by one: the reference."""


def fill(live: Service, steps: int) -> None:
    """Train one step on 8 ranks, and write its numbers as those of all others."""
    ranks = [Rank(live, rank=rank, world_size=RANKS) for rank in range(RANKS)]
    for at, rank in enumerate(ranks):
        handed = payload(64, 128, seed=at, first_sample=64 * at)
        rank.stage(STAGE, 1, handed, scalars={"loss": 1.0})
    for rank in ranks:
        rank.begin(STAGE, steps + 1)
    (own_step,) = (row for row in rows_of(live.store, "steps") if row["step"] == 1)
    (own_metrics,) = rows_of(live.store, "step_metrics")
    for first in range(2, steps + 1, 500):
        puts = []
        for step in range(first, min(first + 500, steps + 1)):
            puts.append(Put("steps", {**own_step, "step": step, "closed_wall": 1.0}))
            puts.append(Put("step_metrics", {**own_metrics, "step": step}))
            for number in range(RANKS):
                key = {"incarnation": f"i-{number}", "work_key": f"{step}", "name": "loss"}
                place = {"attempt_id": 1, "step": step, "stage": STAGE, "role": "actor"}
                puts.append(Put("scalars", {**key, **place, "rank": number, "value": 1.0}))
        live.store.submit(puts).result(120)


def seconds(ask: Callable[[], object]) -> float:
    """The shorter of two askings."""
    taken = []
    for _ in range(2):
        begun = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(steps: int) -> None:
    """Print seconds and ratios."""
    warm()
    with tempfile.TemporaryDirectory() as home, service(Path(home), recorded=False) as live:
        fill(live, steps)
        begun = time.perf_counter()
        for step in range(2, SINGLE + 2):
            live.get(f"/steps/{step}/metrics")
        single = (time.perf_counter() - begun) / SINGLE
        say(f"one by one: {1000 * single:.1f} ms a step, {single * steps:.1f} s for {steps}")
        for asked in ({"metric": METRIC}, {"metric": METRIC, "by": "rank"}, {"metric": "loss"}):
            taken = seconds(lambda asked=asked: live.get("/series", **asked))  # type: ignore[misc]
            say(f"{asked}: {taken:.2f} s, {single * steps / taken:.0f} x as fast")
        taken = seconds(lambda: live.get("/exact"))
        say(f"exact: {taken:.2f} s, {single * steps / taken:.0f} x as fast")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)

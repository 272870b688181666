"""How long the API takes for a closed step, as a ratio to a route that does nothing.

Run: `python -m tests.benchmarks.bench_api`. Both are asked in turns in the same run, by the same
client, over the same connection: only the ratios say something on a busy machine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.support.api import Rank, Service, service
from tests.support.measure import payload

STAGE = "actor_compute_log_prob"
RANKS = 16
ROUNDS = 60
PATHS = (
    "/runs",
    "/steps",
    "/steps/5/metrics",
    "/steps/5/metrics?rank=3",
    "/steps/5/rounds",
    "/steps/5/ranks",
    "/steps/5/tokens?limit=64",
    "/steps/5/stages?limit=500",
    "/metrics",
)


def fill(live: Service) -> None:
    """A closed step 5 of 16 ranks with 64 rows of 512 tokens each."""
    ranks = [Rank(live, rank=rank, world_size=RANKS) for rank in range(RANKS)]
    for step in range(1, 6):
        for index, rank in enumerate(ranks):
            rank.stage(STAGE, step, payload(64, 512, seed=index, first_sample=64 * index))
    for rank in ranks:
        rank.begin(STAGE, 6)


def main() -> None:
    """Print milliseconds and ratios, and the ratio of a first question to a later one."""
    with tempfile.TemporaryDirectory() as home, service(Path(home), recorded=False) as live:
        fill(live)
        first = asked(live, "/steps/5/metrics")
        times: dict[str, list[float]] = {path: [] for path in ("/healthz", *PATHS)}
        for _ in range(ROUNDS):
            for path, found in times.items():
                found.append(asked(live, path))
        base = statistics.median(times["/healthz"])
        out = sys.stdout
        out.write(f"{'route':<28}{'median ms':>10}{'ratio to /healthz':>20}\n")
        for path, found in times.items():
            middle = statistics.median(found)
            out.write(f"{path:<28}{1e3 * middle:>10.2f}{middle / base:>20.1f}\n")
        later = statistics.median(times["/steps/5/metrics"])
        out.write(f"first question of the step: {first / later:.1f} times a later one\n")


def asked(live: Service, path: str) -> float:
    """Seconds of one question."""
    began = time.perf_counter()
    answer = live.read.get(path)
    took = time.perf_counter() - began
    assert answer.status_code == 200, answer.text
    return took


if __name__ == "__main__":
    main()

"""Figures of large runs: how long the server takes, against reading the same rows, and their sizes.

    python -m tests.benchmarks.bench_figures [STEPS [RANKS [ROUNDS]]]

Needs neither Ray nor a GPU nor a browser; a service in this process, its SQLite below a temporary
directory. Times are of the CPU, which is steadier than the clock on a busy machine.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.api import Rank, Service, service
from tests.support.runs.drawn import LOG_PROB, UPDATE, layout, rounds_payload
from tests.support.stores import rows_of

from stagescope_service.figures import (
    comparison,
    density,
    distribution,
    heatmaps,
    overview,
    rounds,
    timeline,
)
from stagescope_service.figures.drawing import as_json
from stagescope_service.figures.run_curves import CurveRequest
from stagescope_service.statistics.step_metrics import VERSION
from stagescope_service.statistics.summarise import warm
from stagescope_service.store.contract import Put
from stagescope_service.store.tables.training import StepRow
from stagescope_service.views.reading.dependencies import Window

LONG, WIDE = "long", "wide"


def fill_long(live: Service, steps: int) -> None:
    """Train one step on 8 ranks, and write its numbers, slightly changed, as those of others."""
    ranks = [Rank(live, run=LONG, rank=at, key="l1", world_size=8) for at in range(8)]
    for at, rank in enumerate(ranks):
        rank.stage(LOG_PROB, 1, rounds_payload(8, 4, 32, seed=at, first_sample=8 * at))
    for rank in ranks:
        rank.begin(LOG_PROB, steps + 1)
    (own_step,) = (row for row in rows_of(live.store, "steps") if row["step"] == 1)
    (own_metrics,) = rows_of(live.store, "step_metrics")
    random = np.random.default_rng(0)
    for first in range(2, steps + 1, 500):
        puts = []
        for step in range(first, min(first + 500, steps + 1)):
            factor = float(np.exp(random.normal(0.0, 0.1))) * (50.0 if step == steps // 3 else 1.0)
            metrics = {name: value * factor for name, value in own_metrics["metrics"].items()}
            puts.append(Put("steps", {**own_step, "step": step, "closed_wall": 1.0}))
            puts.append(Put("step_metrics", {**own_metrics, "step": step, "metrics": metrics}))
            if step % 7 == 0:
                puts.append(Put("findings", {
                    "finding_id": f"f{step}", "run": LONG, "attempt_id": own_step["attempt_id"],
                    "step": step, "kind": "rank_apart", "severity": "warning", "count": 1,
                    "message": "a rank differs", "first_wall": 1.0, "last_wall": 1.0,
                }))  # fmt: skip
        live.store.submit(puts).result(300)


def fill_wide(live: Service, ranks: int, rounds: int) -> None:
    """Train one step on many ranks of tp 8; every rank of tp 3 differs more, and one rank alone."""
    every = [
        Rank(live, run=WIDE, rank=at, key="w1", world_size=ranks, data_rank=at,
             layout=layout(at, 8, max(ranks // 8, 1)))
        for at in range(ranks)
    ]  # fmt: skip
    for at, rank in enumerate(every):
        scale = (1.6 if at % 8 == 3 else 1.0) * (8.0 if at == 517 % ranks else 1.0)
        noise = [0.01 * scale * (1 + index / rounds) for index in range(rounds)]
        rank.stage("rollout_generate", 1, seconds=5.0 + at % 13 / 10)
        handed = rounds_payload(4, rounds, 16, seed=at, first_sample=4 * at, noise=noise)
        rank.stage(LOG_PROB, 1, handed, seconds=2.0)
        rank.stage(UPDATE, 1, seconds=3.0 + (4.0 if at == 77 % ranks else 0.0))
        if at % 100 == 0:
            say(f"  rank {at} of {ranks}")
    for rank in every:
        rank.begin("rollout_generate", 2)


def seconds(ask: Callable[[], object]) -> tuple[float, Any]:
    """Return the seconds of CPU of the second of two calls, and its result."""
    ask()
    begun = time.process_time()
    found = ask()
    return time.process_time() - begun, found


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def report(
    live: Service, name: str, read: Callable[[], object], make: Callable[[], object]
) -> None:
    """Print the time of a figure, that of reading its rows, their ratio, and the sizes."""
    reading, _ = seconds(read)
    first = time.process_time()
    make()
    first = time.process_time() - first
    making, figure = seconds(make)
    drawing, answer = seconds(lambda: live.read.get(f"/figures/{name}"))
    assert answer.status_code == 200, answer.text
    points = sum(len(trace.get("x") or ()) for trace in answer.json()["figure"]["data"])
    del figure
    say(
        f"{name:40} rows {1000 * reading:6.0f} ms   figure {1000 * making:6.0f} ms   "
        f"{making / max(reading, 1e-4):5.1f} x   first {1000 * first:6.0f} ms   "
        f"request {1000 * drawing:6.0f} ms   {len(answer.content) / 1024:7.0f} KiB, {points} points"
    )


def main(steps: int, ranks: int, rounds_: int) -> None:
    """Fill two runs and print a line for each figure."""
    warm()
    with tempfile.TemporaryDirectory() as home, service(Path(home), recorded=False) as live:
        say(f"{steps} steps")
        fill_long(live, steps)
        say(f"{ranks} ranks x {rounds_} rounds")
        fill_wide(live, ranks, rounds_)
        measure(live)


def measure(live: Service) -> None:
    """Print a line for each figure of the two runs."""
    deps, catalogue = live.app.state.deps, live.catalogue
    everything: Window = {"first": None, "last": None}
    names = list(overview.MISMATCH)
    long = int(catalogue.attempts(LONG)[0]["attempt_id"])
    wide = int(catalogue.attempts(WIDE)[0]["attempt_id"])
    report(
        live, f"overview?run={LONG}",
        lambda: (catalogue.step_states([long]),
                 catalogue.stored_numbers([long], names, version=VERSION),
                 catalogue.findings_by_step([long])),
        lambda: as_json(overview.figure(overview.info(deps, LONG, CurveRequest()))),
    )  # fmt: skip
    report(
        live, f"comparison?a={LONG}@1&b={LONG}@1",
        lambda: [catalogue.stored_numbers([long], names, version=VERSION) for _ in range(2)],
        lambda: as_json(comparison.figure(
            comparison.info(deps, f"{LONG}@1", f"{LONG}@1", (), everything)
        )),
    )  # fmt: skip
    newest = catalogue.step_states([long], limit=200)
    report(
        live, f"rank-steps?run={LONG}",
        lambda: catalogue.slices([(long, state.step) for state in newest], version=VERSION),
        lambda: as_json(heatmaps.figure(
            heatmaps.steps_info(deps, LONG, None, everything, heatmaps.DEFAULT)
        )),
    )  # fmt: skip
    target = deps.finder.step(WIDE, None, 1)
    query = f"?run={WIDE}&step=1"

    def step() -> StepRow | None:
        return catalogue.step(wide, 1)

    def fresh() -> None:
        """The first request of a step: nothing of it is in memory."""
        deps.step_summaries._cache.clear()

    def made(
        info: Callable[..., Any], figure: Callable[..., Any], **more: object
    ) -> tuple[str, dict[str, object]]:
        fresh()
        return as_json(figure(info(deps, target, **more)))

    report(live, f"rounds{query}", step, lambda: made(rounds.info, rounds.figure))
    report(
        live, f"rank-rounds{query}", lambda: catalogue.summaries(wide, 1, stage=LOG_PROB),
        lambda: made(heatmaps.rounds_info, heatmaps.figure),
    )  # fmt: skip
    report(live, f"distribution{query}", step, lambda: made(distribution.info, distribution.figure))
    report(live, f"density{query}", step, lambda: made(density.info, density.figure))
    report(
        live, f"timeline{query}", lambda: catalogue.stages(wide, 1, limit=100_000),
        lambda: made(timeline.info, timeline.figure),
    )  # fmt: skip
    begun = time.process_time()
    trace = live.read.get("/steps/1/timeline", params={"run": WIDE})
    took, size = time.process_time() - begun, len(trace.content) / 1024
    events = len(trace.json()["traceEvents"])
    say(f"trace events: {1000 * took:.0f} ms, {size:.0f} KiB, {events} events")


if __name__ == "__main__":
    main(*(int(text) for text in [*sys.argv[1:], *("10000", "1024", "16")[len(sys.argv) - 1 :]]))

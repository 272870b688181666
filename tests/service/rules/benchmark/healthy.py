"""Healthy runs of many kinds: whatever the doctor finds in them is a false alarm."""

from __future__ import annotations

from typing import Final

from tests.service.rules.benchmark.play import Fault
from tests.service.rules.benchmark.scene import Restart, Scene


def _healthy(name: str, scene: Scene, *true: str) -> Fault:
    return Fault(
        kind="healthy", name=name, causes=frozenset(), why="nothing is wrong", scene=scene,
        true=frozenset(true),
    )  # fmt: skip


HEALTHY: Final = (
    _healthy("usual", Scene(steps=100, seed=101)),
    _healthy("usual again", Scene(steps=100, seed=102, model="sure")),
    _healthy("eight ranks", Scene(steps=60, ranks=8, seed=103)),
    _healthy("two ranks", Scene(steps=100, ranks=2, seed=104)),
    _healthy("one rank", Scene(steps=60, ranks=1, rows=8, seed=105)),
    _healthy("tiny batches", Scene(steps=100, ranks=2, rows=2, group=2, reward="smooth", rounds=1,
             usual=12,
                                   longest=32, seed=106)),
    _healthy("sharpens", Scene(steps=100, model="usual", sharpens=2.0, update=0.02, seed=107)),
    _healthy("certain model", Scene(steps=80, model="certain", seed=108)),
    _healthy("unsure model", Scene(steps=60, model="unsure", rounds=1, seed=109)),
    # Its mismatch is above verl's own line, which a default trigger draws.
    _healthy("quantised engine", Scene(steps=80, engine="int8", seed=110), "trigger_fired"),
    _healthy("routing outliers", Scene(steps=80, outliers=0.01, seed=111)),
    _healthy("asynchronous", Scene(steps=80, ages=(0, 0, 1, 2), update=0.02, seed=112),
             "staleness"),
    _healthy("one step off", Scene(steps=60, ages=(1,), update=0.02, seed=113), "staleness"),
    _healthy("one step off, with syncs",
             Scene(steps=40, ages=(1,), update=0.12, syncs=True, seed=120)),
    _healthy("mixed ages, with syncs",
             Scene(steps=40, ages=(0, 1, 1, 2), update=0.12, syncs=True, seed=121), "staleness"),
    _healthy("restarts", Scene(steps=80, seed=114, syncs=True,
                               restarts=(Restart(21, 25), Restart(52, 51)))),
    _healthy("uneven ranks", Scene(steps=80, ranks=6, uneven=True, engines=3, seed=115)),
    _healthy("long rounds", Scene(steps=60, rounds=6, usual=20, longest=256, seed=116,
                                  reward="smooth")),
    _healthy("without ids", Scene(steps=60, has_ids=False, has_scalars=False, seed=117)),
    _healthy("at the longest", Scene(steps=60, rounds=1, usual=60, longest=128, seed=118)),
    _healthy("large updates", Scene(steps=60, update=0.05, syncs=True, seed=119)),
)  # fmt: skip

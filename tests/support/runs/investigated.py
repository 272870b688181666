"""The shown run with what its investigation needs: msprobe's dumps of the step with the NaN.

Documentation, notebooks and pictures are all of this run: what they say of one holds for others.
"""

from __future__ import annotations

from typing import Final

import torch
from tests.support.api import Service
from tests.support.dumps import capture
from tests.support.runs.shown import (
    BROKEN,
    NAN_RANK,
    RESTART,
    RESUMED,
    ShownRun,
    keep_tensors,
)
from tests.support.small_decoder import small_decoder

STEPS: Final = 36
DUMPED: Final = {22: (0,), BROKEN: (0, 1, NAN_RANK)}
"""Step -> ranks that were captured, of both attempts; in `BROKEN` the last has a NaN weight."""
BROKEN_OPERATOR: Final = "blocks.1.down"


def investigated(live: Service, **size: int) -> ShownRun:
    """Feed the training, with the dumps of a capture in its step `BROKEN`; see `ShownRun`."""
    keep_tensors(live)
    training = ShownRun(live, steps=STEPS, **size)
    _train(training, 1, RESTART - 1, attempt=1)
    training.restart()
    _train(training, RESUMED + 1, STEPS, attempt=2)
    return training


def _train(training: ShownRun, first: int, last: int, *, attempt: int) -> None:
    for step in range(first, last + 1):
        training.do(step)
        _dump(training, step, attempt)
    training.train(last + 1, last)  # which begins the step after


def _dump(training: ShownRun, step: int, attempt: int) -> None:
    """Let the ranks that were captured in a step report msprobe's dumps."""
    broken = small_decoder()
    with torch.no_grad():
        broken.get_parameter(f"{BROKEN_OPERATOR}.weight")[3, 5] = float("nan")
    for rank in DUMPED.get(step, ()):
        path = training.live.settings.data_path / f"dumps/{attempt}/{step}/{rank}"
        is_broken = step == BROKEN and rank == NAN_RANK
        path = capture(path, broken if is_broken else None, level="mix")
        training.actors[rank].say(
            "dump", stage="actor_update", step=step, capture_id="3f0c9a51e2b7", state="complete",
            path=str(path), bytes=sum(each.stat().st_size for each in path.glob("*")), files=3,
            seconds=0.41, task="statistics", level="mix",
        )  # fmt: skip

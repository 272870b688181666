"""The time of a training step with the probe and without it, in turn."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Annotated, ClassVar, Final

from tests.tools.trial_device.models import Training
from tests.tools.trial_device.results import Effort, Figure, Result, as_fast, check, spread
from tests.tools.trial_device.spooled import SpooledProbe, spooled_probe
from tests.tools.trial_device.target import Target

_STATEMENT: Final = "a step with the probe takes as long as without it"
_ARRIVED: Final = "each recorded step arrived"
_MOST_PASSES: Final = 200
_BLOCK: Final = 4
_LIMIT: Final = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps(Result):
    title: ClassVar[str] = "A step with and without the probe"
    payload: Annotated[float, Figure("tensors recorded in a step", "MB")]
    plain: Annotated[float, Figure("step without the probe", "ms")]
    probed: Annotated[float, Figure("step with the probe", "ms")]
    ratio: Annotated[float, Figure("the second over the first", "x")]
    noise: Annotated[float, Figure("quartiles of the plain steps, over their median", "x")]
    record: Annotated[float, Figure("record, log and the stage, on the training thread", "ms")]
    first: Annotated[float, Figure("the same in the first step (allocates)", "ms")]


def measure(target: Target, effort: Effort) -> Steps:
    """Run blocks of plain and of probed steps in turn.

    A step is sent while the next one runs: no plain step follows before that is done.
    """
    training = Training(target, effort)
    one = target.host_seconds(training.step, 3)
    passes = min(_MOST_PASSES, max(1, math.ceil(effort.step_seconds / one)))
    plain: list[float] = []
    probed: list[float] = []
    records: list[float] = []
    arrived = 0
    with spooled_probe(run="trial-steps") as spooled:

        def with_probe() -> None:
            loss = training.step(passes)
            number = len(records)
            records.append(_seconds(lambda: _report(spooled, training, number, loss)))

        _waited(target, with_probe)  # allocates
        while len(probed) < effort.steps:
            arrived += _taken(spooled)
            plain += [_waited(target, lambda: training.step(passes)) for _ in range(_BLOCK)]
            probed += [_waited(target, with_probe) for _ in range(_BLOCK)]
        arrived += sum(each.kind == "end" for each in spooled.close())
    first, *records = records
    ratio = statistics.median(probed) / statistics.median(plain)
    noise = spread(plain)
    limit = 1.0 + max(_LIMIT, noise)
    return Steps(
        payload=training.batch.nbytes / 1e6, plain=statistics.median(plain) * 1e3,
        probed=statistics.median(probed) * 1e3, ratio=ratio, noise=noise,
        record=statistics.median(records) * 1e3, first=first * 1e3,
        checks=(
            as_fast(_STATEMENT, ratio, limit, is_accelerator=target.is_accelerator),
            check(_ARRIVED, arrived == len(probed) + 1, f"{arrived} of {len(probed) + 1}"),
        ),
    )  # fmt: skip


def _taken(spooled: SpooledProbe) -> int:
    """Wait until everything is written; return the number of stages that were."""
    deadline = time.monotonic() + 30.0
    while spooled.probe.status()["waiting_events"] and time.monotonic() < deadline:
        time.sleep(0.01)
    return sum(each.kind == "end" for each in spooled.take())


def _report(spooled: SpooledProbe, training: Training, number: int, loss: object) -> None:
    with spooled.probe.stage("actor_compute_log_prob", step=number) as stage:
        stage.record(training.batch._asdict())
        stage.log(loss=loss)


def _waited(target: Target, call: Callable[[], object]) -> float:
    def whole() -> None:
        call()
        target.synchronize()

    target.synchronize()
    return _seconds(whole)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began

"""`DeviceTimer`: the device's own time of a piece of work, against the clock of the host."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated, ClassVar, Final

from tests.tools.trial_device.results import (
    Check,
    Effort,
    Figure,
    Result,
    check,
    not_possible,
)
from tests.tools.trial_device.spooled import spooled_probe
from tests.tools.trial_device.target import Target

from stagescope_workers.device import DeviceTimer

_SAME: Final = "DeviceTimer measures what the host's clock measures around the same work"
_FREE: Final = "starting and stopping it waits for nothing"
_REPORTED: Final = "a stage reports the device's seconds with device_events=True"
_STATEMENTS: Final = (_SAME, _FREE, _REPORTED)
_WORK_SECONDS: Final = 0.1
_TOLERANCE: Final = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing(Result):
    title: ClassVar[str] = "DeviceTimer"
    device: Annotated[float | None, Figure("DeviceTimer", "ms")]
    host: Annotated[float | None, Figure("the host's clock, waiting for the same work", "ms")]
    overhead: Annotated[float | None, Figure("start and stop, on the training thread", "us")]
    reported: Annotated[float | None, Figure("device seconds that a stage reports", "ms")]


def measure(target: Target, effort: Effort) -> Timing:
    """Time the same work both ways, and once inside a stage."""
    if not target.is_accelerator:
        reason = f"{target.kind} has no events"
        none = tuple(not_possible(each, reason) for each in _STATEMENTS)
        return Timing(device=None, host=None, overhead=None, reported=None, checks=none)
    target.keep_busy(_WORK_SECONDS)
    on_device, on_host, overheads = [], [], []
    for _ in range(effort.repeats):
        target.synchronize()
        began = time.perf_counter()
        timer = DeviceTimer.start()
        started = time.perf_counter()
        assert timer is not None, "the device is in use"
        target.keep_busy(_WORK_SECONDS)
        stopping = time.perf_counter()
        timer.stop()
        stopped = time.perf_counter()
        target.synchronize()
        on_host.append(time.perf_counter() - began)
        on_device.append(timer.seconds())
        overheads.append(started - began + stopped - stopping)
    middle = len(on_device) // 2
    device, host = sorted(on_device)[middle], sorted(on_host)[middle]
    overhead = sorted(overheads)[middle]
    reported = _reported(target)
    off = abs(device - host) / host
    checks = [
        check(_SAME, off <= _TOLERANCE, f"they differ by {off:.1%}"),
        check(_FREE, overhead < 0.1 * host, f"{overhead * 1e6:.0f} us of {host * 1e3:.0f} ms"),
        _is_reported(reported, device),
    ]
    return Timing(
        device=device * 1e3, host=host * 1e3, overhead=overhead * 1e6,
        reported=None if reported is None else reported * 1e3, checks=tuple(checks),
    )  # fmt: skip


def _is_reported(reported: float | None, device: float) -> Check:
    if reported is None:
        return check(_REPORTED, False, "the event has none")
    off = abs(reported - device) / device
    return check(_REPORTED, off <= 2 * _TOLERANCE, f"it differs by {off:.1%} from DeviceTimer")


def _reported(target: Target) -> float | None:
    with spooled_probe(run="trial-timer", device_events=True) as spooled:
        target.synchronize()
        with spooled.probe.stage("trial", step=1):
            target.keep_busy(_WORK_SECONDS)
        [end] = [each for each in spooled.close() if each.kind == "end"]
    found = end.fields["device_seconds"]
    return None if found is None else float(found)

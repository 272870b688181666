"""Ten minutes' worth of asynchronous training squeezed into one: nothing may grow or be lost."""

from __future__ import annotations

import dataclasses
import os
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Final

import torch
from tests.tools.trial_device.results import Check, Effort, Figure, Result, check
from tests.tools.trial_device.spooled import SpooledProbe, spooled_probe
from tests.tools.trial_device.target import Target

STEPS_PER_SECOND: Final = 10.0
"""An asynchronous training that closes a step a second, ten times as fast."""
_ROLLOUTS: Final = 4
"""Rollout stages a step: of one step and version each, overlapping the trainer's."""
_ROWS: Final = 32
_TOKENS: Final = 1024
_WARM_UP: Final = 0.2
_ARRIVED: Final = "each payload arrived, with the bits that were recorded"
_BOUNDED: Final = "no payload was dropped, and nothing was left waiting"
_FLAT: Final = "nothing grows: the last third of the load against its first"

Sample = Mapping[str, float]
_UNITS: Final = {
    "memory of the process": "MB", "device memory": "MB", "pinned memory": "MB",
    "reserved of the pinned pool": "MB", "waiting bytes": "MB", "descriptors": "", "threads": "",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grown:
    """One thing that is watched."""

    what: str
    first: Annotated[float, Figure("median of the first third", "")]
    last: Annotated[float, Figure("median of the last third", "")]
    largest: Annotated[float, Figure("largest", "")]

    @property
    def name(self) -> str:
        return f"{self.what}, {_UNITS[self.what]}" if _UNITS[self.what] else self.what

    @property
    def line(self) -> str:
        return f"{self.first:.4g} -> {self.last:.4g}, largest {self.largest:.4g}"

    @property
    def is_growth(self) -> bool:
        """Whether it grew by more than an eighth and 16 MB (or 4 pieces)."""
        room = 16.0 if _UNITS[self.what] else 4.0
        return self.last > 1.125 * self.first + room


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load(Result):
    title: ClassVar[str] = "Ten minutes of asynchronous load, squeezed"
    seconds: Annotated[float, Figure("duration", "s")]
    steps: Annotated[int, Figure("steps of the trainer", "")]
    payloads: Annotated[int, Figure("payloads of trainer and rollout", "")]
    megabytes: Annotated[float, Figure("their size", "MB")]
    at_once: Annotated[int, Figure("copies for which no pinned memory was free", "")]
    watched: tuple[Grown, ...]


class _Role:
    """A thread that reports stages of one role on a stream of its own."""

    def __init__(self, target: Target, spooled: SpooledProbe, seed: int) -> None:
        self._target = target
        self._spooled = spooled
        self._values = target.place(torch.rand(_ROWS, _TOKENS))
        self._ids = target.place(torch.full((_ROWS, _TOKENS), seed))
        self._mask = target.place(torch.ones(_ROWS, _TOKENS, dtype=torch.bool))
        self.expected: dict[tuple[int, int], int] = {}
        """(step, occurrence) -> checksum of `ids`, which are overwritten after each record."""
        self.nbytes = 0

    def report(self, stage: str, step: int, occurrence: int, version: int) -> None:
        """Record the buffers, then overwrite them as a trainer does."""
        mark = step * _ROLLOUTS + occurrence
        self._ids.fill_(mark)
        with self._spooled.probe.stage(
            stage, step=step, policy_version=version, occurrence=occurrence
        ) as open_stage:
            open_stage.record(
                rollout_log_probs=self._values, responses=self._ids, response_mask=self._mask
            )
            open_stage.log(reward=self._values[0, 0])
        self._ids.fill_(-1)
        self._values.mul_(0.999)
        ids = torch.full((_ROWS, _TOKENS), mark).numpy()
        self.expected[step, occurrence] = zlib.crc32(ids.tobytes())
        self.nbytes += ids.nbytes + 5 * _ROWS * _TOKENS


def measure(target: Target, effort: Effort) -> Load:
    """Run a trainer and a rollout that is up to three versions behind, in threads."""
    steps = max(10, round(effort.load_seconds * STEPS_PER_SECOND))
    with (
        spooled_probe(run="trial-load", role="actor") as actor,
        spooled_probe(run="trial-load", role="rollout") as rollout,
    ):
        return _run(target, actor, rollout, steps)


def _run(target: Target, actor: SpooledProbe, rollout: SpooledProbe, steps: int) -> Load:
    trainer, engine = _Role(target, actor, 0), _Role(target, rollout, 1)
    found: dict[str, dict[tuple[int, int], int]] = {"actor": {}, "rollout": {}}
    samples: list[Sample] = []
    failures: list[BaseException] = []
    began = time.monotonic()

    def train(step: int) -> None:
        trainer.report("actor_update", step, 0, step)

    def generate(step: int) -> None:
        for occurrence in range(_ROLLOUTS):
            engine.report("rollout_generate", step, occurrence, max(0, step - occurrence))

    threads = [
        threading.Thread(target=_paced, args=(target, call, steps, began, failures), daemon=True)
        for call in (train, generate)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        _take(actor, found["actor"])
        _take(rollout, found["rollout"])
        samples.append(_sample(target, actor, rollout))
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    seconds = time.monotonic() - began
    statuses = [each.probe.status() for each in (actor, rollout)]
    dropped = [each["dropped"] for each in statuses if each["dropped"]]
    _take(actor, found["actor"], close=True)
    _take(rollout, found["rollout"], close=True)
    left = [each.probe.status()["pending_bytes"] for each in (actor, rollout)]
    reserved = [each.probe.pool.reserved for each in (actor, rollout)]
    wrong = _wrong(trainer.expected, found["actor"]) + _wrong(engine.expected, found["rollout"])
    payloads = len(trainer.expected) + len(engine.expected)
    watched = _watched(samples)
    grown = [f"{each.name} {each.first:.1f} -> {each.last:.1f}" for each in watched
             if each.is_growth]  # fmt: skip
    kept = f"dropped {dropped}, waiting {sum(left)} bytes, reserved {sum(reserved)} bytes"
    checks: list[Check] = [
        check(_ARRIVED, not wrong, f"{wrong} of {payloads} are missing or wrong"),
        check(_BOUNDED, not dropped and not sum(left) and not sum(reserved), kept),
        check(_FLAT, not grown, "; ".join(grown) or f"{len(samples)} samples"),
    ]
    return Load(
        seconds=seconds, steps=steps, payloads=payloads,
        megabytes=(trainer.nbytes + engine.nbytes) / 1e6,
        at_once=sum(each["blocking_copies"] for each in statuses), watched=watched,
        checks=tuple(checks),
    )  # fmt: skip


def _paced(
    target: Target, call: Callable[[int], None], steps: int, began: float,
    failures: list[BaseException],
) -> None:  # fmt: skip
    try:
        with target.side_stream():
            for step in range(steps):
                time.sleep(max(0.0, began + step / STEPS_PER_SECOND - time.monotonic()))
                call(step)
            target.synchronize()
    except BaseException as error:  # raised again by the measurement
        failures.append(error)


def _take(spooled: SpooledProbe, found: dict[tuple[int, int], int], close: bool = False) -> None:
    for each in spooled.close() if close else spooled.take():
        if each.kind == "end":
            part = (int(each.fields["step"]), int(each.fields["occurrence"]))
            ids = each.tensors.get("responses")
            found[part] = -1 if ids is None else zlib.crc32(ids.tobytes())


def _wrong(expected: Mapping[tuple[int, int], int], found: Mapping[tuple[int, int], int]) -> int:
    return sum(found.get(part) != value for part, value in expected.items())


def _sample(target: Target, *spooled: SpooledProbe) -> Sample:
    return {
        "memory of the process": _resident() / 1e6,
        "device memory": target.memory() / 1e6,
        "pinned memory": (target.pinned_memory() or 0) / 1e6,
        "reserved of the pinned pool": sum(each.probe.pool.reserved for each in spooled) / 1e6,
        "waiting bytes": sum(each.probe.status()["pending_bytes"] for each in spooled) / 1e6,
        "descriptors": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(threading.active_count()),
    }


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def _watched(samples: Sequence[Sample]) -> tuple[Grown, ...]:
    """Compare thirds of the samples, without those of the warm-up."""
    calm = samples[int(_WARM_UP * len(samples)) :]
    third = max(1, len(calm) // 3)
    found = []
    for what in _UNITS:
        values = [each[what] for each in calm]
        found.append(
            Grown(
                what=what, first=statistics.median(values[:third]),
                last=statistics.median(values[-third:]), largest=max(values),
            )
        )  # fmt: skip
    return tuple(found)

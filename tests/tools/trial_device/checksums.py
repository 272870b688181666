"""Checksums of weights: the device's against the host's, and how fast each is."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Final

import torch
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

from stagescope_workers.checksum import checksum, unsigned

_SAME: Final = "checksums of tensors on the device equal those of the host"
_REPORTED: Final = "record_weights reports the same numbers"
_ON_DEVICE: Final = "the device computes them"
_ROWS: Final = 4096

View = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checksums(Result):
    title: ClassVar[str] = "Checksums of weights"
    megabytes: Annotated[float, Figure("bfloat16 weights", "MB")]
    on_device: Annotated[float, Figure("checksums where the weights are", "GB/s")]
    on_host: Annotated[float, Figure("checksums of the same weights on the host", "GB/s")]
    over_host: Annotated[float, Figure("the first over the second", "x")]
    copy: Annotated[float, Figure("a plain copy of them where they are", "GB/s")]
    call: Annotated[float, Figure("the calls return after", "ms")]
    memory: Annotated[float | None, Figure("memory on the device meanwhile", "MB")]
    compared: Annotated[int, Figure("tensors that were compared, one a dtype or layout", "")]


def measure(target: Target, effort: Effort) -> Checksums:
    """Compare odd tensors, then time a set of large ones."""
    hosts, placed = _odd_tensors(target)
    expected = {name: unsigned(int(checksum(tensor))) for name, tensor in hosts.items()}
    sums = {name: checksum(tensor) for name, tensor in placed.items()}
    found = {name: unsigned(int(value)) for name, value in sums.items()}
    checks = [
        _compared(_SAME, expected, found),
        _compared(_REPORTED, expected, _reported(placed)),
        _computed_there(target, sums),
    ]
    return _timed(target, effort, checks, len(hosts))


def _compared(statement: str, expected: Mapping[str, int], found: Mapping[str, int]) -> Check:
    wrong = [name for name in expected if found.get(name) != expected[name]]
    text = f"{len(expected)} tensors" if not wrong else f"wrong: {', '.join(wrong)}"
    return check(statement, not wrong, text)


def _computed_there(target: Target, sums: Mapping[str, int | torch.Tensor]) -> Check:
    if not target.is_accelerator:
        return not_possible(_ON_DEVICE, "the weights are on the host")
    if all(isinstance(value, torch.Tensor) for value in sums.values()):
        return check(_ON_DEVICE, True, "the results are tensors on the device")
    if target.kind == "cuda":
        return check(_ON_DEVICE, False, "the host computes them")
    reason = f"integers of this {target.kind} differ from the host's, which computes them instead"
    return not_possible(_ON_DEVICE, reason)


def _odd_tensors(target: Target) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Return the same tensors on the host and on the device, with the same strides."""
    made: dict[str, tuple[torch.Tensor, View]] = {}
    generator = torch.Generator().manual_seed(1)

    def raw(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8):
        size = torch.empty((), dtype=dtype).element_size()
        made[str(dtype).removeprefix("torch.")] = raw(700, 600 * size).view(dtype), _unchanged
    made["bool"] = raw(700, 601) > 127, _unchanged
    made["an odd number of bytes"] = raw(1_000_003), _unchanged
    made["transposed"] = raw(512, 4 * 900).view(torch.int32), lambda tensor: tensor.t()
    made["every second column"] = raw(512, 2 * 900).view(torch.int16), lambda tensor: tensor[:, ::2]
    made["not aligned to words"] = raw(400_001), lambda tensor: tensor[1:]
    made["empty"] = torch.empty(0), _unchanged
    hosts = {name: view(base) for name, (base, view) in made.items()}
    return hosts, {name: view(target.place(base)) for name, (base, view) in made.items()}


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _reported(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, int]:
    """Return the sums of the WEIGHTS event."""
    with spooled_probe(run="trial-weights") as spooled:
        spooled.probe.record_weights(tensors, version=1, side="trainer")
        [event] = [each for each in spooled.close() if each.kind == "weights"]
    return {name: int(value) for name, value, *_ in event.fields["tensors"]}


def _timed(target: Target, effort: Effort, checks: list[Check], compared: int) -> Checksums:
    columns = min(effort.weight_bytes, 32 << 20) // (2 * _ROWS)
    count = max(1, effort.weight_bytes >> 25)
    hosts = [torch.full((_ROWS, columns), 0.5 + at, dtype=torch.bfloat16) for at in range(count)]
    tensors = [target.place(host) for host in hosts]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    nbytes = sum(host.numel() * host.element_size() for host in hosts)

    def copying() -> None:
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)

    def summing() -> None:
        for tensor in tensors:
            checksum(tensor)

    def on_host() -> None:
        for host in hosts:
            checksum(host)

    copy = target.host_seconds(copying, effort.repeats)
    summed = target.host_seconds(summing, effort.repeats)
    memory, call = _cost(target, summing)
    host = target.host_seconds(on_host, min(3, effort.repeats))
    return Checksums(
        megabytes=nbytes / 1e6, on_device=nbytes / summed / 1e9, on_host=nbytes / host / 1e9,
        over_host=host / summed, copy=nbytes / copy / 1e9, call=call * 1e3, memory=memory,
        compared=compared, checks=tuple(checks),
    )  # fmt: skip


def _cost(target: Target, summing: Callable[[], object]) -> tuple[float | None, float]:
    """Return megabytes of the device that the sums need, and the seconds until the call returns."""
    before = target.memory()
    if target.is_accelerator:
        target.backend.reset_peak_memory_stats()
    target.synchronize()
    began = time.perf_counter()
    summing()
    call = time.perf_counter() - began
    target.synchronize()
    if not target.is_accelerator:
        return None, call
    return (int(target.backend.max_memory_allocated()) - before) / 1e6, call

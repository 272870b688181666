"""Copies from the device to the host: their rate against the bus, and what training waits for."""

from __future__ import annotations

import dataclasses
import time
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
from tests.tools.trial_device.target import Target

from stagescope_workers.device import HostCopy, PinnedPool, copy_tensor
from stagescope_workers.payload import WireTensor

_QUEUED: Final = "a queued copy has 80 % of the rate of a plain copy into pinned memory"
_RETURNS: Final = "the call returns while the stream that computes the tensor is still busy"
_PINNED: Final = "a queued copy is in pinned memory"
_EXACT: Final = "each copy has the bits of its tensor"
_LEAST_SHARE: Final = 0.8
_BUSY_SECONDS: Final = 0.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyFigures:
    """One size."""

    megabytes: float
    bus: Annotated[float, Figure("plain copy_ into a pinned buffer (the bus)", "GB/s")]
    queued: Annotated[float, Figure("our copy, on the device's stream", "GB/s")]
    share: Annotated[float, Figure("our copy over the plain one", "x")]
    blocking: Annotated[float, Figure("plain tensor.cpu() into ordinary memory", "GB/s")]
    whole: Annotated[float, Figure("our copy until it is in ordinary memory", "GB/s")]
    first_call: Annotated[float, Figure("first call of this size (allocates)", "ms")]
    call: Annotated[float, Figure("each later call: what training waits for", "ms")]

    @property
    def name(self) -> str:
        return f"{self.megabytes:g} MB"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copies(Result):
    title: ClassVar[str] = "Copies from the device to the host"
    sizes: tuple[CopyFigures, ...]
    busy: Annotated[float | None, Figure("the stream is busy behind the call for", "ms")]
    busy_call: Annotated[float | None, Figure("the call returns after", "ms")]


def measure(target: Target, effort: Effort) -> Copies:
    """Measure each size, and one copy behind a busy stream."""
    measured = [_size(target, nbytes, effort.repeats) for nbytes in effort.copy_bytes]
    sizes = tuple(figures for figures, _ in measured)
    wrong = [figures.name for figures, exact in measured if not exact]
    checks = [check(_EXACT, not wrong, f"wrong: {', '.join(wrong)}" if wrong else "all sizes")]
    if not target.is_accelerator:
        reason = f"{target.kind} has no bus and no streams"
        checks += [not_possible(each, reason) for each in (_QUEUED, _RETURNS, _PINNED)]
        return Copies(sizes=sizes, busy=None, busy_call=None, checks=tuple(checks))
    largest = sizes[-1]
    text = f"{largest.share:.2f} at {largest.name}"
    checks.append(check(_QUEUED, largest.share >= _LEAST_SHARE, text))
    busy, call, behind = _behind_a_busy_stream(target, effort.copy_bytes[-1])
    checks += behind
    return Copies(sizes=sizes, busy=busy * 1e3, busy_call=call * 1e3, checks=tuple(checks))


def _size(target: Target, nbytes: int, repeats: int) -> tuple[CopyFigures, bool]:
    host = torch.arange(nbytes // 4, dtype=torch.int32)
    tensor = target.place(host)
    pool = PinnedPool()
    began = time.perf_counter()
    first = copy_tensor("t", tensor, pool)
    first_call = time.perf_counter() - began
    exact = bool((torch.from_numpy(_finished(first)[2]) == host).all())
    buffer = torch.empty(host.shape, dtype=host.dtype, pin_memory=target.is_accelerator)
    calls: list[float] = []

    def plain() -> None:
        buffer.copy_(tensor, non_blocking=True)

    def queued() -> None:
        began = time.perf_counter()
        copy_tensor("t", tensor, pool)
        calls.append(time.perf_counter() - began)

    bus = target.stream_seconds(plain, repeats)
    ours = target.stream_seconds(queued, repeats, before=pool.settle)
    target.synchronize()
    pool.settle()
    blocking = target.host_seconds(lambda: tensor.to("cpu", copy=True), repeats)
    whole = target.host_seconds(lambda: _finished(copy_tensor("t", tensor, pool)), repeats)
    pool.settle()
    later = sorted(calls[1:])
    figures = CopyFigures(
        megabytes=round(nbytes / 1e6, 3), bus=nbytes / bus / 1e9, queued=nbytes / ours / 1e9,
        share=bus / ours, blocking=nbytes / blocking / 1e9, whole=nbytes / whole / 1e9,
        first_call=first_call * 1e3, call=later[len(later) // 2] * 1e3,
    )  # fmt: skip
    return figures, exact


def _behind_a_busy_stream(target: Target, nbytes: int) -> tuple[float, float, list[Check]]:
    """Copy a tensor that a side stream computes after long work; the call must not wait for it."""
    pool = PinnedPool()
    tensor = target.place(torch.zeros(nbytes // 4))
    _finished(copy_tensor("t", tensor, pool))  # its pinned memory is allocated now
    target.keep_busy(0.0)
    with target.side_stream():
        busy = target.keep_busy(_BUSY_SECONDS)
        tensor.fill_(1.0)
        began = time.perf_counter()
        copy = copy_tensor("t", tensor, pool)
        call = time.perf_counter() - began
        is_pinned = isinstance(copy, HostCopy) and copy._pinned.is_pinned()
        was_ready = not isinstance(copy, HostCopy) or copy.ready()
        tensor.fill_(2.0)
        values = _finished(copy)[2]
    is_right = bool((values == 1.0).all())
    text = f"{call * 1e3:.2f} ms for {busy * 1e3:.0f} ms of work"
    if was_ready:
        text += "; the copy was complete at once"
    if not is_right:
        text += "; the values are not those of its own stream"
    holds = not was_ready and is_right and call < 0.5 * busy
    where = "torch says so" if is_pinned else "torch says that it is not"
    return busy, call, [check(_RETURNS, holds, text), check(_PINNED, is_pinned, where)]


def _finished(copy: WireTensor | HostCopy) -> WireTensor:
    return copy.finish() if isinstance(copy, HostCopy) else copy

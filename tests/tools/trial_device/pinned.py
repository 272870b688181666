"""The pinned pool: its limit, what torch's allocator holds for it, and what is left afterwards."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Final

import torch
from tests.tools.trial_device.results import Effort, Figure, Result, check, not_possible
from tests.tools.trial_device.target import Target

from stagescope_workers.device import HostCopy, PinnedPool, copy_tensor

_LIMITED: Final = "copies under way take no more pinned memory than the limit"
_AT_ONCE: Final = "beyond the limit a tensor is copied at once, and counted"
_RETURNED: Final = "nothing is reserved once the copies are finished"
_BOUNDED: Final = "a second round of the same copies allocates no more pinned memory"
_BUSY_SECONDS: Final = 0.1
_PIECES: Final = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pinned(Result):
    title: ClassVar[str] = "The pinned pool"
    limit: Annotated[float, Figure("its limit in this trial", "MB")]
    reserved: Annotated[float | None, Figure("reserved at most", "MB")]
    held: Annotated[float | None, Figure("pinned memory that torch holds for it", "MB")]
    over_reserved: Annotated[
        float | None, Figure("that over it: torch rounds up to powers of two", "x")
    ]
    second: Annotated[float | None, Figure("held after a second round", "MB")]


def measure(target: Target, effort: Effort) -> Pinned:
    """Queue twice the limit behind a busy stream, twice."""
    piece = effort.copy_bytes[-1] // 4 + 4096  # not a power of two, to which torch rounds up
    pool = PinnedPool(limit=_PIECES // 2 * piece)
    limit = pool.limit / 1e6
    if not target.is_accelerator:
        reason = f"copies on {target.kind} need no pinned memory"
        none = tuple(not_possible(each, reason) for each in (_LIMITED, _AT_ONCE, _RETURNED))
        return Pinned(limit=limit, reserved=None, held=None, over_reserved=None, second=None,
                      checks=(*none, not_possible(_BOUNDED, reason)))  # fmt: skip
    tensor = target.place(torch.zeros(piece, dtype=torch.uint8))
    before = target.pinned_memory()
    first_reserved, queued = _round(target, tensor, pool)
    held = target.pinned_memory()
    blocking = pool.blocking_copies
    left = pool.reserved
    second_reserved, _ = _round(target, tensor, pool)
    second = target.pinned_memory()
    reserved = max(first_reserved, second_reserved)
    checks = [
        check(_LIMITED, 0 < reserved <= pool.limit,
              f"{reserved / 1e6:.1f} of {pool.limit / 1e6:.1f} MB"),
        check(_AT_ONCE, blocking == _PIECES - queued and queued == _PIECES // 2,
              f"{queued} queued, {blocking} at once"),
        check(_RETURNED, left == 0 and pool.reserved == 0, f"{left + pool.reserved} bytes"),
    ]  # fmt: skip
    if before is None or held is None or second is None:
        reason = f"torch.{target.kind} of torch {torch.__version__} has no host_memory_stats"
        checks.append(not_possible(_BOUNDED, reason))
        return Pinned(limit=limit, reserved=reserved / 1e6, held=None, over_reserved=None,
                      second=None, checks=tuple(checks))  # fmt: skip
    grown = second - held
    checks.append(check(_BOUNDED, grown <= piece, f"{grown / 1e6:.1f} MB more"))
    return Pinned(
        limit=limit, reserved=reserved / 1e6, held=(held - before) / 1e6,
        over_reserved=(held - before) / reserved, second=(second - before) / 1e6,
        checks=tuple(checks),
    )  # fmt: skip


def _round(target: Target, tensor: torch.Tensor, pool: PinnedPool) -> tuple[int, int]:
    """Queue all pieces; return the bytes reserved at most, and how many were queued."""
    target.keep_busy(_BUSY_SECONDS)
    copies = []
    reserved = 0
    for _ in range(_PIECES):
        copies.append(copy_tensor("t", tensor, pool))
        reserved = max(reserved, pool.reserved)
    for copy in copies:
        if isinstance(copy, HostCopy):
            copy.finish()
    pool.settle()
    return reserved, sum(isinstance(copy, HostCopy) for copy in copies)

"""Copies tensors from a device to the host without blocking the training thread.

The copy is queued on the device's current stream into pinned memory, followed by an event. The
background thread waits for the event and moves the bytes into ordinary memory, so pinned memory
is used only during the copy. Pinned memory is bounded. Where none is available the tensor
is copied at once, which waits for the device, never for the service.

CUDA and NPU have the same interface in torch (`torch.cuda`, `torch.npu`), chosen by device type.
"""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from stagescope_wire.errors import InvalidTensor
from stagescope_wire.tensors import DTYPE_BYTES
from stagescope_workers.payload import (
    Array,
    IntArray,
    Spec,
    WireTensor,
    check_torch,
    dtype_tag,
    host_tensor,
    is_torch,
    jagged_parts,
    owned_tensor,
)

if TYPE_CHECKING:
    import torch

DEFAULT_PINNED_BYTES: Final = 512 << 20

Backend: TypeAlias = Any
"""The untyped module `torch.cuda` or `torch.npu`, or an event of it."""
Offsets: TypeAlias = "torch.Tensor | IntArray | None"
"""Row offsets of a packed tensor, int64 [rows + 1], on the device or the host."""


class HostCopy:
    """One tensor of a payload that is being copied from a device."""

    def __init__(
        self, spec: Spec, pinned: torch.Tensor, event: Backend, offsets: Offsets, pool: PinnedPool
    ) -> None:
        self.spec = spec
        self._pinned: Any = pinned
        self._event: Backend = event
        self._offsets = offsets
        self._pool = pool
        self._wire: WireTensor | None = None

    def ready(self) -> bool:
        """Return whether the device has written everything."""
        return self._wire is not None or bool(self._event.query())

    def finish(self) -> WireTensor:
        """Wait for the device, free the pinned memory and return the tensor.

        Not for the training thread.
        """
        if self._wire is None:
            self._event.synchronize()
            tag, shape, _ = self.spec
            self._wire = (tag, shape, _bits(self._pinned), _host_offsets(self._offsets))
            self._pinned = self._offsets = self._event = None
            self._pool.release(self.spec.nbytes)
        return self._wire


class BorrowedTensor:
    """A host tensor that its owner will not write any more; the background thread copies it."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        self.spec = Spec(dtype_tag(tensor.dtype), tuple(tensor.shape), None)
        self._name = name
        self._tensor: torch.Tensor | None = tensor
        self._version = tensor._version
        self._wire: WireTensor | None = None

    def finish(self) -> WireTensor | None:
        """Return a copy; None where torch counted a write since. Not for the training thread."""
        if self._tensor is not None:
            wire = owned_tensor(self._name, self._tensor)
            # After the copy, so that writes before and during it are counted.
            self._wire = wire if self._tensor._version == self._version else None
            self._tensor = None
        return self._wire


def borrow_tensor(
    name: str, value: object, pool: PinnedPool
) -> WireTensor | HostCopy | BorrowedTensor:
    """Reference a dense torch tensor on the host without a copy; copy anything else.

    Raises:
        InvalidTensor: see `payload.host_tensor`.
    """
    if not is_torch(value) or _is_on_device(value) or value.is_nested:
        return copy_tensor(name, value, pool)
    check_torch(name, value)
    is_supported = dtype_tag(value.dtype) in DTYPE_BYTES
    return BorrowedTensor(name, value) if is_supported else copy_tensor(name, value, pool)


class PinnedPool:
    """Limits pinned host memory to `limit` bytes at a time; torch's own allocator reuses it."""

    def __init__(self, limit: int = DEFAULT_PINNED_BYTES) -> None:
        self.limit = limit
        self.reserved = 0
        self.blocking_copies = 0
        self._lock = threading.Lock()
        self._copies: collections.deque[HostCopy] = collections.deque()

    def reserve(self, nbytes: int) -> bool:
        """Reserve `nbytes`; return False where they are not available."""
        with self._lock:
            if self.reserved + nbytes > self.limit:
                self.blocking_copies += 1
                return False
            self.reserved += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Release `nbytes`."""
        with self._lock:
            self.reserved -= nbytes

    def add(self, copy: HostCopy) -> None:
        """Let `settle` finish `copy` once the device has written it."""
        self._copies.append(copy)

    def settle(self) -> int:
        """Finish the copies that are ready, in order; return the number of unfinished ones."""
        while self._copies and self._copies[0].ready():
            self._copies.popleft().finish()
        return len(self._copies)


def copy_tensor(name: str, value: object, pool: PinnedPool) -> WireTensor | HostCopy:
    """Return a copy of `value`, or the copy that is queued on the tensor's device.

    Raises:
        InvalidTensor: see `payload.host_tensor`.
    """
    rows = value if isinstance(value, list | tuple) and value else None
    if rows is not None and all(is_torch(row) and _is_on_device(row) for row in rows):
        return _start_copy(name, *_concatenated(name, rows), pool)
    if not is_torch(value) or not _is_on_device(value):
        return owned_tensor(name, value)
    check_torch(name, value)
    if not value.is_nested:
        return _start_copy(name, value, None, pool)
    values, offsets = jagged_parts(value) or _concatenated(name, value.unbind())
    return _start_copy(name, values, offsets, pool)


def device_backend(tensor: torch.Tensor) -> Backend:
    """Return the torch module of the tensor's type of device: `torch.cuda`, `torch.npu`."""
    return getattr(sys.modules["torch"], tensor.device.type)


def _is_on_device(value: torch.Tensor) -> bool:
    return value.device.type not in {"cpu", "meta"}


def _concatenated(name: str, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, IntArray]:
    for i, row in enumerate(rows):
        check_torch(f"{name}[{i}]", row)
    if len({row.dtype for row in rows}) != 1 or any(row.dim() != 1 for row in rows):
        raise InvalidTensor(
            f"{name} is a list of {len(rows)} tensors of unlike dtypes or shapes",
            expected="1-D rows of one dtype",
        )
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([row.shape[0] for row in rows], out=offsets[1:])
    return sys.modules["torch"].cat([row.detach() for row in rows]), offsets


def _start_copy(
    name: str, values: torch.Tensor, row_offsets: Offsets, pool: PinnedPool
) -> WireTensor | HostCopy:
    values, offsets = values.detach(), row_offsets
    tag = str(values.dtype).removeprefix("torch.")
    rows = None if offsets is None else int(offsets.shape[0]) - 1
    nbytes = values.numel() * values.element_size()
    backend = device_backend(values)
    if tag in {"uint16", "uint32"} or not hasattr(backend, "Event") or not pool.reserve(nbytes):
        wire = host_tensor(name, values)
        return (*wire[:3], _host_offsets(offsets))
    torch = sys.modules["torch"]
    try:
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        if is_torch(row_offsets):  # small; pinned too, so that nothing blocks here
            pin = row_offsets.device.type != "cpu"
            offsets = torch.empty(row_offsets.shape, dtype=row_offsets.dtype, pin_memory=pin)
            offsets.copy_(row_offsets, non_blocking=True)
        event = backend.Event()
        event.record(backend.current_stream(values.device))
    except BaseException:
        pool.release(nbytes)
        raise
    spec = Spec(tag, tuple(int(size) for size in values.shape), rows)
    copy = HostCopy(spec, pinned, event, offsets, pool)
    pool.add(copy)
    return copy


def _bits(pinned: torch.Tensor) -> Array:
    torch = sys.modules["torch"]
    if pinned.dtype is torch.bfloat16:
        return np.array(pinned.view(torch.int16).numpy().view(np.uint16), copy=True)
    return np.array(pinned.numpy(), copy=True)


def _host_offsets(offsets: Offsets) -> IntArray | None:
    if offsets is None or isinstance(offsets, np.ndarray):
        return offsets
    return offsets.cpu().numpy().astype(np.int64)


class DeviceTimer:
    """Measures seconds between two events on the device's current stream, without waiting."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._begin = self._record_event()
        self._end: Backend | None = None

    def _record_event(self) -> Backend:
        event = self._backend.Event(enable_timing=True)
        event.record()
        return event

    @classmethod
    def start(cls) -> DeviceTimer | None:
        """Record the beginning; return None where this process uses no device."""
        torch = sys.modules.get("torch")
        for kind in ("npu", "cuda"):
            backend = getattr(torch, kind, None)
            if backend is not None and backend.is_available() and backend.is_initialized():
                return cls(backend)
        return None

    def stop(self) -> None:
        """Record the end; does not wait."""
        self._end = self._record_event()

    def ready(self) -> bool:
        """Return whether the device has reached the end."""
        return self._end is not None and bool(self._end.query())

    def seconds(self) -> float:
        """Wait for the device and return the seconds; not for the training thread."""
        assert self._end is not None, "the timer was not stopped"
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000.0

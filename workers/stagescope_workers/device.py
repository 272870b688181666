"""Tensors on their way from a device to the host, without the training thread waiting.

The copy is queued on the device's current stream into pinned memory, with an event behind it; the
background thread waits for the event and moves the bytes on into ordinary memory, so that pinned
memory is taken only for the moment of the copy. Pinned memory is bounded: where it is all taken
the tensor is copied at once, which waits for the device, never for the service.

CUDA and NPU speak the same words in torch (`torch.cuda`, `torch.npu`), found by the device's type.
"""

from __future__ import annotations

import collections
import sys
import threading
from typing import Any, Final

import numpy as np

from stagescope.wire.errors import InvalidTensor
from stagescope.wire.schema import DTYPE_BYTES
from stagescope_workers.payload import (
    Array,
    Spec,
    WireTensor,
    check_torch,
    dtype_tag,
    host_tensor,
    is_torch,
    jagged_parts,
    owned_tensor,
)

DEFAULT_PINNED_BYTES: Final = 512 << 20


class HostCopy:
    """One tensor of a payload that a device is still writing."""

    def __init__(self, spec: Spec, pinned: Any, event: Any, offsets: Any, pool: PinnedPool) -> None:
        self.spec = spec
        self._pinned: Any = pinned
        self._event: Any = event
        self._offsets: Any = offsets
        self._pool = pool
        self._wire: WireTensor | None = None

    def ready(self) -> bool:
        """Say whether the device has written everything."""
        return self._wire is not None or bool(self._event.query())

    def finish(self) -> WireTensor:
        """Wait for the device, free the pinned memory and return the tensor. Not for training."""
        if self._wire is None:
            self._event.synchronize()
            tag, shape, _ = self.spec
            self._wire = (tag, shape, _bits(self._pinned), _host_offsets(self._offsets))
            self._pinned = self._offsets = self._event = None
            self._pool.release(self.spec.nbytes)
        return self._wire


class BorrowedTensor:
    """A tensor on the host whose owner promised not to write it: copied when there is time."""

    def __init__(self, name: str, tensor: Any) -> None:
        tensor = tensor.detach()
        self.spec = Spec(dtype_tag(tensor.dtype), tuple(tensor.shape), None)
        self._name = name
        self._tensor: Any = tensor
        self._version = tensor._version
        self._wire: WireTensor | None = None

    def finish(self) -> WireTensor | None:
        """Return a copy; None where torch counted a write since. Not for training."""
        if self._tensor is not None:
            wire = owned_tensor(self._name, self._tensor)
            # After the copy: what was written before or meanwhile is counted by then.
            self._wire = wire if self._tensor._version == self._version else None
            self._tensor = None
        return self._wire


def lend_tensor(
    name: str, value: object, pool: PinnedPool
) -> WireTensor | HostCopy | BorrowedTensor:
    """Hold a dense torch tensor of the host without a copy; of anything else own one.

    Raises:
        InvalidTensor: see `payload.host_tensor`.
    """
    if not is_torch(value) or _on_device(value) or getattr(value, "is_nested", False):
        return take_tensor(name, value, pool)
    check_torch(name, value)
    tag = dtype_tag(getattr(value, "dtype", None))
    return BorrowedTensor(name, value) if tag in DTYPE_BYTES else take_tensor(name, value, pool)


class PinnedPool:
    """At most `limit` bytes of pinned host memory at a time; torch's own allocator reuses it."""

    def __init__(self, limit: int = DEFAULT_PINNED_BYTES) -> None:
        self.limit = limit
        self.taken = 0
        self.blocking_copies = 0
        self._lock = threading.Lock()
        self._copies: collections.deque[HostCopy] = collections.deque()

    def take(self, nbytes: int) -> bool:
        """Reserve `nbytes`; False where they are not to be had."""
        with self._lock:
            if self.taken + nbytes > self.limit:
                self.blocking_copies += 1
                return False
            self.taken += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Give `nbytes` back."""
        with self._lock:
            self.taken -= nbytes

    def watch(self, copy: HostCopy) -> None:
        """Let `settle` finish `copy` as soon as the device has written it."""
        self._copies.append(copy)

    def settle(self) -> int:
        """Finish the copies that are ready, in order; return how many still are on their way."""
        while self._copies and self._copies[0].ready():
            self._copies.popleft().finish()
        return len(self._copies)


def take_tensor(name: str, value: object, pool: PinnedPool) -> WireTensor | HostCopy:
    """Own a copy of `value` when this returns, or have it queued on the tensor's device.

    Raises:
        InvalidTensor: see `payload.host_tensor`.
    """
    rows = value if isinstance(value, list | tuple) and value else None
    if rows is not None and all(is_torch(row) and _on_device(row) for row in rows):
        return _start(name, *_joined(name, rows), pool)
    if not is_torch(value) or not _on_device(value):
        return owned_tensor(name, value)
    tensor: Any = value
    check_torch(name, tensor)
    if not tensor.is_nested:
        return _start(name, tensor, None, pool)
    return _start(name, *(jagged_parts(tensor) or _joined(name, tensor.unbind())), pool)


def backend_of(tensor: Any) -> Any:
    """Return the torch module of the tensor's kind of device: `torch.cuda`, `torch.npu`."""
    return getattr(sys.modules["torch"], tensor.device.type)


def _on_device(value: Any) -> bool:
    return value.device.type not in {"cpu", "meta"}


def _joined(name: str, rows: Any) -> tuple[Any, Any]:
    """Join rows on their device; their lengths are known on the host."""
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


def _start(name: str, values: Any, row_offsets: Any, pool: PinnedPool) -> WireTensor | HostCopy:
    values, offsets = values.detach(), row_offsets
    tag = str(values.dtype).removeprefix("torch.")
    rows = None if offsets is None else int(offsets.shape[0]) - 1
    nbytes = values.numel() * values.element_size()
    backend = backend_of(values)
    if tag in {"uint16", "uint32"} or not hasattr(backend, "Event") or not pool.take(nbytes):
        wire = host_tensor(name, values)
        return (*wire[:3], _host_offsets(offsets))
    torch = sys.modules["torch"]
    try:
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        if is_torch(offsets):  # small; pinned beside its values so that nothing waits here
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
    pool.watch(copy)
    return copy


def _bits(pinned: Any) -> Array:
    """Return the tensor's bytes in ordinary memory (bfloat16 as uint16)."""
    torch = sys.modules["torch"]
    if pinned.dtype is torch.bfloat16:
        return np.array(pinned.view(torch.int16).numpy().view(np.uint16), copy=True)
    return np.array(pinned.numpy(), copy=True)


def _host_offsets(offsets: Any) -> Any:
    if offsets is None or isinstance(offsets, np.ndarray):
        return offsets
    return offsets.cpu().numpy().astype(np.int64)


class DeviceTimer:
    """Seconds between two moments on the device's current stream, known some time later."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._begin = self._mark()
        self._end: Any = None

    def _mark(self) -> Any:
        event = self._backend.Event(enable_timing=True)
        event.record()
        return event

    @classmethod
    def start(cls) -> DeviceTimer | None:
        """Mark the beginning; None where this process has no device in use."""
        torch = sys.modules.get("torch")
        for kind in ("npu", "cuda"):
            backend = getattr(torch, kind, None)
            if backend is not None and backend.is_available() and backend.is_initialized():
                return cls(backend)
        return None

    def stop(self) -> None:
        """Mark the end; waits for nothing."""
        self._end = self._mark()

    def ready(self) -> bool:
        """Say whether the device has passed the end."""
        return self._end is not None and bool(self._end.query())

    def seconds(self) -> float:
        """Wait for the device and return the time between the marks. Not for training."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000.0

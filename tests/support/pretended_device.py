"""A device that this machine lacks: streams, events, and tensors that lie about where they are.

Work is done at once. It counts as done when a clock says so, which only moves when it is read or
waited for, so that nothing depends on how busy this machine is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, Final

import torch
from tests.tools.trial_device.target import Target

_READ: Final = 1e-6
_QUERY: Final = 0.01
_LEAST: Final = 1e-3
"""Of the seconds between two events."""


@dataclasses.dataclass(frozen=True)
class Place:
    type: str = "pretended"
    index: int = 0


class PretendedTensor(torch.Tensor):
    """Lies about its device, as a tensor on an accelerator would tell the truth about its own."""

    @property
    def device(self) -> Place:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        return Place()

    def cpu(self, memory_format: object = None) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


class Clock:
    """Stands in for the module `time` where a measurement reads it."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()

    def perf_counter(self) -> float:
        with self._lock:
            self._now += _READ
            return self._now

    def wait_until(self, then: float) -> None:
        with self._lock:
            self._now = max(self._now, then)


class PretendedStream:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.finished = 0.0
        """When its work is done."""

    def add(self, seconds: float) -> None:
        self.finished = max(self._clock.perf_counter(), self.finished) + seconds

    def wait_stream(self, other: PretendedStream) -> None:
        self.finished = max(self.finished, other.finished)


class PretendedEvent:
    def __init__(self, backend: PretendedBackend) -> None:
        self._backend = backend
        self._at = 0.0

    def record(self, stream: PretendedStream | None = None) -> None:
        stream = stream or self._backend.current_stream()
        self._at = max(self._backend.clock.perf_counter(), stream.finished)

    def query(self) -> bool:
        now = self._backend.clock.perf_counter()
        self._backend.clock.wait_until(now + _QUERY)
        return now >= self._at

    def synchronize(self) -> None:
        self._backend.clock.wait_until(self._at)

    def elapsed_time(self, end: PretendedEvent) -> float:
        return (end._at - self._at + _LEAST) * 1e3


class PretendedBackend:
    """As much of `torch.cuda` as the probe and a trial use."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._streams = [PretendedStream(self.clock)]
        self._current = threading.local()

    def Event(self, enable_timing: bool = False) -> PretendedEvent:
        return PretendedEvent(self)

    def Stream(self) -> PretendedStream:
        self._streams.append(PretendedStream(self.clock))
        return self._streams[-1]

    def current_stream(self, device: object = None) -> PretendedStream:
        found: PretendedStream = getattr(self._current, "stream", self._streams[0])
        return found

    @contextlib.contextmanager
    def stream(self, stream: PretendedStream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def synchronize(self) -> None:
        self.clock.wait_until(max(stream.finished for stream in self._streams))

    def memory_allocated(self) -> int:
        return 0

    def max_memory_allocated(self) -> int:
        return 0

    def reset_peak_memory_stats(self) -> None:
        pass


class PretendedTarget(Target):
    """A target on such a device."""

    def __init__(self) -> None:
        super().__init__("pretended", PretendedBackend())

    @property
    def device(self) -> Any:
        return Place()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone().as_subclass(PretendedTensor)

    def keep_busy(self, seconds: float) -> float:
        self.backend.current_stream().add(seconds)
        return seconds

"""The device on which a trial runs: one interface over `torch.cuda`, `torch.npu` and the host."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from stagescope_workers.probe.identity import driver_versions

KINDS: Final = ("cuda", "npu", "cpu")
_BUSY_WIDTH: Final = 4096
_MOST_LAUNCHES: Final = 400
"""A queue of CUDA holds about a thousand launches; beyond that a launch waits."""


class Target:
    """A device and what torch offers for it.

    Args:
        kind: "cuda", "npu" or "cpu".
        backend: `torch.cuda` or `torch.npu`; None for the host.
    """

    def __init__(self, kind: str, backend: Any = None) -> None:
        self.kind = kind
        self.backend = backend

    @classmethod
    def find(cls, kind: str) -> Target:
        """Return the device of a kind; "auto": the first that this machine has.

        Raises:
            RuntimeError: this machine has none of that kind, with the reason.
        """
        problems = []
        for each in KINDS if kind == "auto" else (kind,):
            if each == "cpu":
                torch.set_num_threads(1)  # beside other programs, threads that wait for each other
                return cls("cpu")
            backend, problem = _backend(each)
            if backend is not None:
                backend.init()
                return cls(each, backend)
            problems.append(problem)
        raise RuntimeError("; ".join(problems))

    @property
    def is_accelerator(self) -> bool:
        return self.backend is not None

    @property
    def device(self) -> torch.device:
        if self.backend is None:
            return torch.device("cpu")
        return torch.device(self.kind, int(self.backend.current_device()))

    @property
    def name(self) -> str:
        """The card's name, or the processor's."""
        if self.backend is not None:
            return str(self.backend.get_device_name(self.device))
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()

    def description(self) -> dict[str, object]:
        """Return what the figures were measured on."""
        return {
            "kind": self.kind,
            "name": self.name,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "memory_gb": self._gigabytes(),
            "drivers": driver_versions(),
        }

    def _gigabytes(self) -> float | None:
        if self.backend is None:
            return None
        total = getattr(self.backend.get_device_properties(self.device), "total_memory", None)
        return None if total is None else round(int(total) / 1e9, 1)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a host tensor in memory of its own on the device."""
        return tensor.to(self.device, copy=True)

    def synchronize(self) -> None:
        if self.backend is not None:
            self.backend.synchronize()

    def memory(self) -> int:
        """Return the bytes that tensors take on the device; 0 on the host."""
        return 0 if self.backend is None else int(self.backend.memory_allocated())

    def pinned_memory(self) -> int | None:
        """Return the bytes of pinned memory that torch's allocator holds; None where unknown."""
        read = getattr(self.backend, "host_memory_stats", None)
        if read is None:
            return None
        stats = read()
        # Which of the two is what the allocator holds depends on torch's version.
        names = ("allocated_bytes.current", "reserved_bytes.current")
        return max((int(stats[name]) for name in names if name in stats), default=None)

    # --- time -----------------------------------------------------------------------------

    def host_seconds(
        self, call: Callable[[], object], repeats: int, before: Callable[[], object] | None = None
    ) -> float:
        """Return the median time of `call` with everything that it queues; see `stream_seconds`."""
        times = []
        for _ in range(repeats + 1):
            if before is not None:
                before()
            self.synchronize()
            began = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def stream_seconds(
        self, call: Callable[[], object], repeats: int, before: Callable[[], object] | None = None
    ) -> float:
        """Return the median time between two events of the device around `call`.

        On the host it is the time of the call.

        Args:
            call: what is timed.
            repeats: number of calls after a first one.
            before: called before each of them, outside its time.
        """
        if self.backend is None:
            return self.host_seconds(call, repeats, before)
        times = []
        for _ in range(repeats + 1):
            if before is not None:
                before()
            self.synchronize()
            begin = self.backend.Event(enable_timing=True)
            end = self.backend.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) / 1000.0)
        return statistics.median(times[1:])

    # --- streams --------------------------------------------------------------------------

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Queue on another stream than the default one, behind what that one has; no more after."""
        if self.backend is None:
            yield
            return
        default, side = self.backend.current_stream(), self.backend.Stream()
        side.wait_stream(default)
        with self.backend.stream(side):
            yield
        default.wait_stream(side)

    def keep_busy(self, seconds: float) -> float:
        """Queue work of about `seconds` on the current stream; return what it should take.

        Nothing is queued on the host, which has no queue: 0 is returned.
        """
        if self.backend is None:
            return 0.0
        launches = min(_MOST_LAUNCHES, max(1, math.ceil(seconds / self._launch_seconds)))
        matrix, product = self._matrices
        for _ in range(launches):
            torch.mm(matrix, matrix, out=product)
        return launches * self._launch_seconds

    @functools.cached_property
    def _matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        matrix = self.place(torch.full((_BUSY_WIDTH, _BUSY_WIDTH), 1e-3))
        product = torch.empty_like(matrix)
        self.synchronize()
        return matrix, product

    @functools.cached_property
    def _launch_seconds(self) -> float:
        matrix, product = self._matrices

        def ten() -> None:
            for _ in range(10):
                torch.mm(matrix, matrix, out=product)

        return self.stream_seconds(ten, 3) / 10.0


def _backend(kind: str) -> tuple[Any, str]:
    if kind == "npu" and not hasattr(torch, "npu"):
        try:
            importlib.import_module("torch_npu")
        except Exception as error:  # without CANN its import raises errors of many kinds
            return None, f"torch_npu cannot be imported: {error!s:.200}"
    backend = getattr(torch, kind, None)
    if backend is None or not backend.is_available():
        return None, f"torch {torch.__version__} finds no {kind} device"
    return backend, ""

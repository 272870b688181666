"""Shards compared as tasks of a Ray cluster, where the files lie on a shared disk."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from stagescope.wire.errors import ComparisonFailed, Unreachable
from stagescope_service.compare.running import Mapper

T = TypeVar("T")
R = TypeVar("R")

CPUS: Final = 0.5
"""Of a task: half of its time it waits for the disk."""
_AT_ONCE: Final = 2
"""Tasks in flight a CPU of the cluster."""


def ray_tasks(address: str | None = None) -> Mapper:
    """Return a mapper over Ray tasks.

    Args:
        address: of the cluster, where this process has not joined one yet.

    Raises:
        Unreachable: there is no such cluster.
    """
    if not ray.is_initialized():
        try:
            ray.init(address=address or "auto", log_to_driver=False)
        except (ConnectionError, RuntimeError) as error:
            raise Unreachable(
                f"no Ray cluster could be joined: {error}",
                expected="a running cluster (RAY_ADDRESS, or `ray start`)",
                advice="leave out --ray: threads of this process compare too",
            ) from error
    resources: Any = ray.cluster_resources  # untyped in ray
    most = max(int(_AT_ONCE * resources().get("CPU", 1)), 2)

    def run(function: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
        remote: Any = ray.remote(num_cpus=CPUS, max_retries=2)(_call)
        waiting: collections.deque[Any] = collections.deque()
        for task in tasks:
            waiting.append(remote.remote(function, task))
            if len(waiting) >= most:
                yield _answer(waiting.popleft())
        while waiting:
            yield _answer(waiting.popleft())

    return run


def _answer(task: Any) -> Any:
    try:
        return ray.get(task)
    except RayTaskError as error:  # what the function raised, which Ray wraps
        raise error.cause from error
    except RayError as error:
        raise ComparisonFailed(
            f"a task of the comparison did not end: {error}",
            advice="leave out --ray: threads of this process compare too",
        ) from error


def _call(function: Callable[[T], R], task: T) -> R:
    return function(task)

"""Compares shards in tasks of a Ray cluster; the files must be on a shared disk."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from stagescope_service.clusters import AUTO, head_of
from stagescope_service.compare.task_runner import Mapper
from stagescope_wire.errors import ComparisonFailed, Unreachable

T = TypeVar("T")
R = TypeVar("R")

CPUS: Final = 0.5
"""CPUs of a task, which waits for the disk half of the time."""
_TASKS_PER_CPU: Final = 2
"""Tasks in flight per CPU of the cluster."""


def ray_tasks(address: str | None = None) -> Mapper:
    """Return a mapper that runs a function in Ray tasks.

    Args:
        address: of the cluster to join; ignored where this process has joined one.

    Raises:
        InvalidInput: the address names no cluster.
        Unreachable: there is no such cluster.
    """
    if not ray.is_initialized():
        head = head_of(address or os.environ.get("RAY_ADDRESS") or AUTO)
        try:
            ray.init(address=head, log_to_driver=False)
        except (ConnectionError, RuntimeError) as error:
            raise Unreachable(
                f"no Ray cluster could be joined: {error}",
                expected="a running cluster (RAY_ADDRESS, or `ray start`)",
                advice="leave out --ray: threads of this process compare too",
            ) from error
    resources: Any = ray.cluster_resources  # untyped in ray
    max_running = max(int(_TASKS_PER_CPU * resources().get("CPU", 1)), 2)

    def run(function: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
        remote: Any = ray.remote(num_cpus=CPUS, max_retries=2)(_call)  # untyped in ray
        running: collections.deque[ray.ObjectRef[R]] = collections.deque()
        for task in tasks:
            running.append(remote.remote(function, task))
            if len(running) >= max_running:
                yield _result(running.popleft())
        while running:
            yield _result(running.popleft())

    return run


def _result(task: ray.ObjectRef[R]) -> R:
    """Wait for a task; raise the error that its function raised."""
    try:
        return ray.get(task)
    except RayTaskError as error:  # Ray wraps the function's error
        raise error.cause from error
    except RayError as error:
        raise ComparisonFailed(
            f"a task of the comparison did not end: {error}",
            advice="leave out --ray: threads of this process compare too",
        ) from error


def _call(function: Callable[[T], R], task: T) -> R:
    return function(task)

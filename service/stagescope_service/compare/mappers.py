"""How shards are compared side by side: a mapper calls a function for each task.

A mapper may run tasks anywhere (function, tasks and answers can be pickled), gives the answers in
the tasks' order, and holds no more than a few tasks' tensors at a time.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Mapper(Protocol):
    """Calls a function for each task and yields the answers in order."""

    def __call__(self, function: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
        """Yield `function(task)` of each task."""
        ...


def threads(count: int | None = None) -> Mapper:
    """Return a mapper over threads of this process; the kernel lets the others run.

    Args:
        count: how many, and so how many tasks' tensors are in memory; one a processor, at most 8.
    """
    workers = min(os.cpu_count() or 1, 8) if count is None else count

    def run(function: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
        if workers <= 1 or len(tasks) <= 1:
            yield from map(function, tasks)
            return
        with ThreadPoolExecutor(workers, "compare") as pool:
            waiting: collections.deque[Future[Any]] = collections.deque()
            for task in tasks:
                waiting.append(pool.submit(function, task))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    return run

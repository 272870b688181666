"""Run the tasks of a comparison through a mapper; tasks on the same two files run together."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from stagescope_service.compare import flow
from stagescope_service.compare.pairing.tasks import JoinTask, PairTask, TaskOutcome, run_tasks
from stagescope_service.compare.plan import BatchPass, EntryPair, SectionMatch
from stagescope_service.compare.tolerances import Tolerances
from stagescope_service.dumps.records import Dump

T = TypeVar("T")
R = TypeVar("R")


class Mapper(Protocol):
    """Calls a function for each task and yields the results in order."""

    def __call__(self, function: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
        """Yield `function(task)` of each task."""
        ...


def thread_mapper(count: int | None = None) -> Mapper:
    """Return a mapper over threads of this process; the kernels release Python's lock.

    Args:
        count: number of threads, and so of tasks whose tensors are in memory at a time; by default
            one a processor, at most 8.
    """
    workers = min(os.cpu_count() or 1, 8) if count is None else count

    def run(function: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
        if workers <= 1 or len(tasks) <= 1:
            yield from map(function, tasks)
            return
        with ThreadPoolExecutor(workers, "compare") as pool:
            pending: collections.deque[Future[R]] = collections.deque()
            for task in tasks:
                pending.append(pool.submit(function, task))
                if len(pending) > workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    return run


Progress = Callable[[int, int], None]
"""Called with (tasks done, tasks planned so far)."""

PassKey = tuple[str, str, BatchPass]
"""(section, borrowed section, pass)."""
_ItemKey = tuple[str, str, EntryPair]
_Files = tuple[Path | None, Path | None]


@dataclasses.dataclass(frozen=True, slots=True)
class WorkItem:
    """A pair of entries to compare.

    Attributes:
        match: the match to which it belongs.
        pair: entries of one location, or of the same samples.
        has_no_counterpart: the pair is one entry, whose samples lie in other parts of the other
            side.
    """

    match: SectionMatch
    pair: EntryPair
    has_no_counterpart: bool = False

    @property
    def key(self) -> _ItemKey:
        """Its identity among all items."""
        return (self.match.section, self.match.borrowed, self.pair)

    @property
    def pass_key(self) -> PassKey:
        """The pass to which it belongs; a sample occurs once in it."""
        return (self.match.section, self.match.borrowed, self.match.pass_of_pair(self.pair))

    @property
    def has_rows(self) -> bool:
        """Whether its tensors are by sample, not by name."""
        return self.match.section not in flow.NAMED_SECTIONS

    @property
    def files(self) -> _Files:
        """The files of its entries."""
        one, other = (None if entry is None else entry.path for entry in self.pair)
        return (one, other)


class TaskRunner:
    """Runs the tasks of two sides."""

    def __init__(
        self,
        dumps: tuple[Dump, Dump],
        tolerances: Tolerances,
        mapper: Mapper,
        progress: Progress,
    ) -> None:
        self._dumps = dumps
        self._tolerances = tolerances
        self._mapper = mapper
        self._progress = progress
        self._done = self._planned = 0
        self._by_files: dict[_Files, list[WorkItem]] = {}
        self._prefetched: dict[_ItemKey, TaskOutcome] = {}
        self.differing_samples: frozenset[str] = frozenset()
        """Labels of samples of which only tokens and masks are compared."""

    def prefetch(self, matches: Sequence[SectionMatch]) -> None:
        """Let later calls compare these matches together with other items of their files."""
        for match in matches:
            for pair in match.entry_pairs():
                item = WorkItem(match, pair)
                self._by_files.setdefault(item.files, []).append(item)

    def compare_pairs(self, items: Sequence[WorkItem], *, index_only: bool) -> list[TaskOutcome]:
        """Return the outcome of each item; see `PairTask.index_only`."""
        if index_only:
            return self.run_all([self._task(item, index_only=True) for item in items])
        requested = {item.key for item in items}
        groups: dict[_Files, list[WorkItem]] = {}
        for item in items:
            if item.key not in self._prefetched:
                groups.setdefault(item.files, []).append(item)
        for files, group in groups.items():
            group += [
                item
                for item in self._by_files.get(files, ())
                if item.key not in requested and item.key not in self._prefetched
            ]
        tasks = [
            tuple(self._task(item, prefetch=item.key not in requested) for item in group)
            for group in groups.values()
        ]
        grouped = itertools.chain.from_iterable(groups.values())
        for item, outcome in zip(grouped, self._run(tasks), strict=True):
            if outcome is not None:
                self._prefetched[item.key] = outcome
        return [self._prefetched.pop(item.key) for item in items]

    def run_all(self, tasks: Sequence[PairTask | JoinTask]) -> list[TaskOutcome]:
        """Return the outcome of each task; each runs on its own."""
        return [outcome for outcome in self._run([(t,) for t in tasks]) if outcome is not None]

    def _task(
        self, item: WorkItem, *, index_only: bool = False, prefetch: bool = False
    ) -> PairTask:
        return PairTask(
            self._dumps, item.pair, item.match.section, self._tolerances, self.differing_samples,
            index_only, prefetch,
        )  # fmt: skip

    def _run(self, groups: Sequence[Sequence[PairTask | JoinTask]]) -> Iterator[TaskOutcome | None]:
        self._planned += sum(map(len, groups))
        for outcomes in self._mapper(run_tasks, groups):
            self._done += len(outcomes)
            self._progress(self._done, self._planned)
            yield from outcomes

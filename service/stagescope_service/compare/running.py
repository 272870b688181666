"""Tasks of a comparison handed to a mapper: what the same two files hold is compared in one go."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from stagescope_service.compare import flow
from stagescope_service.compare.pairing.shards import JoinTask, Outcome, PairTask, run_tasks
from stagescope_service.compare.plan import Match, Pair, Unit
from stagescope_service.compare.tolerances import Tolerances
from stagescope_service.dumps.records import Dump

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


Progress = Callable[[int, int], None]
"""Told (tasks done, tasks known so far)."""

UnitKey = tuple[str, str, Unit]
_WorkKey = tuple[str, str, Pair]
_Files = tuple[Path | None, Path | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Entries of one place, or of the same samples, and in which unit they lie.

    `is_alone`: of an entry without a counterpart, since its samples lie in other parts there.
    """

    match: Match
    pair: Pair
    is_alone: bool = False

    @property
    def key(self) -> _WorkKey:
        """What it is among all."""
        return (self.match.section, self.match.borrowed, self.pair)

    @property
    def unit(self) -> UnitKey:
        """Within it a sample is there once."""
        return (self.match.section, self.match.borrowed, self.match.unit_of(self.pair))

    @property
    def has_rows(self) -> bool:
        """Whether its tensors are by sample, not by name."""
        return self.match.section not in flow.NAMED

    @property
    def files(self) -> _Files:
        """The files of its entries."""
        one, other = (None if entry is None else entry.path for entry in self.pair)
        return (one, other)


class Runner:
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
        self._tasks = [0, 0]
        self._beside: dict[_Files, list[Work]] = {}
        self._ahead: dict[_WorkKey, Outcome] = {}
        self.tokens_differ: frozenset[str] = frozenset()
        """Labels of samples of which nothing but tokens and masks is compared."""

    def expect(self, matches: Sequence[Match]) -> None:
        """Compare these with what else of their files is compared, before they are asked for."""
        for match in matches:
            for pair in match.entry_pairs():
                work = Work(match, pair)
                self._beside.setdefault(work.files, []).append(work)

    def pairs(self, works: Sequence[Work], *, joined: bool) -> list[Outcome]:
        """Return the outcome of each; see `PairTask.joined`."""
        if joined:
            return self.all([self._task(work, joined=True) for work in works])
        wanted = {work.key for work in works}
        groups: dict[_Files, list[Work]] = {}
        for work in works:
            if work.key not in self._ahead:
                groups.setdefault(work.files, []).append(work)
        for files, group in groups.items():
            beside = self._beside.get(files, ())
            group += [w for w in beside if w.key not in wanted and w.key not in self._ahead]
        tasks = [
            tuple(self._task(work, ahead=work.key not in wanted) for work in group)
            for group in groups.values()
        ]
        asked = itertools.chain.from_iterable(groups.values())
        for work, outcome in zip(asked, self._run(tasks), strict=True):
            if outcome is not None:
                self._ahead[work.key] = outcome
        return [self._ahead.pop(work.key) for work in works]

    def all(self, tasks: Sequence[PairTask | JoinTask]) -> list[Outcome]:
        """Return the outcome of each task, each done for itself."""
        return [outcome for outcome in self._run([(t,) for t in tasks]) if outcome is not None]

    def _task(self, work: Work, *, joined: bool = False, ahead: bool = False) -> PairTask:
        return PairTask(
            self._dumps, work.pair, work.match.section, self._tolerances, self.tokens_differ,
            joined, ahead,
        )  # fmt: skip

    def _run(self, tasks: Sequence[Sequence[PairTask | JoinTask]]) -> Iterator[Outcome | None]:
        self._tasks[1] += sum(map(len, tasks))
        for outcomes in self._mapper(run_tasks, tasks):
            self._tasks[0] += len(outcomes)
            self._progress(self._tasks[0], self._tasks[1])
            yield from outcomes

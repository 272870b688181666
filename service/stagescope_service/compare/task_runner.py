"""Plan which entries of two dumps are compared, and run these tasks through a mapper.

Everything is discovered from the dumps. Tasks on the same two files run together.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from stagescope_service.compare import flow
from stagescope_service.compare.pairing.tasks import JoinTask, PairTask, TaskOutcome, run_tasks
from stagescope_service.compare.results import ComparisonFinding, Verdict
from stagescope_service.compare.tolerances import Tolerances
from stagescope_service.dumps.formats.own import KIND as OWN
from stagescope_service.dumps.importing import KEY_PREFIX
from stagescope_service.dumps.records import SECTIONS, Dump, DumpEntry, Location

COUNTERPART_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "is_loss": ("forward_data", "old_log_probs", "advantages", "loss"),
    "advantages": ("trajectories",),
    "old_log_probs": ("trajectories",),
}
"""Sections in which a side without a section may hold some of its tensors."""

THREADS: Final = "compare"
"""What the names of the threads begin with in which tasks run."""

EntryPair = tuple[DumpEntry | None, DumpEntry | None]
"""An entry of each side; None where a side has no counterpart."""


class BatchPass(NamedTuple):
    """One pass over the samples of a step: a sample occurs in it once, split over its shards."""

    step: int | None
    stage: str | None
    occurrence: int
    epoch: int

    @classmethod
    def of(cls, location: Location) -> BatchPass:
        """Return the pass of a location."""
        return cls(location.step, location.stage, location.part.occurrence, location.part.epoch)

    def __str__(self) -> str:
        parts = ["" if self.step is None else f"step {self.step}", self.stage or ""]
        parts += [f"occurrence {self.occurrence}"] if self.occurrence else []
        parts += [f"epoch {self.epoch}"] if self.epoch else []
        return ", ".join(part for part in parts if part) or "epoch 0"


@dataclasses.dataclass(frozen=True, slots=True)
class SectionMatch:
    """Entries of two sides that may hold the same.

    Attributes:
        section: the section under which they are reported.
        entries: the entries of each side.
        common_locations: location of every entry -> the form of it that both sides share.
        borrowed: the section of one side's entries, if it is another one.
    """

    section: str
    entries: tuple[tuple[DumpEntry, ...], tuple[DumpEntry, ...]]
    common_locations: Mapping[Location, Location]
    borrowed: str = ""

    def pass_of(self, entry: DumpEntry) -> BatchPass:
        """Return the pass of an entry."""
        return BatchPass.of(self.common_locations[entry.location])

    def pass_of_pair(self, pair: EntryPair) -> BatchPass:
        """Return the pass of a pair."""
        entry = pair[0] or pair[1]
        assert entry is not None
        return self.pass_of(entry)

    def entry_pairs(self) -> Iterator[EntryPair]:
        """Yield pairs of entries of one location; passes that only one side has are left out."""
        passes = [{self.pass_of(entry) for entry in entries} for entries in self.entries]
        shared = passes[0] & passes[1]
        by_location: dict[Location, tuple[list[DumpEntry], list[DumpEntry]]] = {}
        for side, entries in enumerate(self.entries):
            for entry in entries:
                if self.pass_of(entry) in shared:
                    location = self.common_locations[entry.location]
                    by_location.setdefault(location, ([], []))[side].append(entry)
        for one, other in by_location.values():
            yield from _entry_pairs(one, other)


def plan(a: Dump, b: Dump) -> tuple[list[SectionMatch], list[ComparisonFinding]]:
    """Return what to compare, in the order of the flow, and what only one side has."""
    sides: list[dict[str, list[DumpEntry]]] = [collections.defaultdict(list) for _ in range(2)]
    for by_section, dump in zip(sides, (a, b), strict=True):
        for entry in dump.entries:
            by_section[entry.section].append(entry)
    one, other = sides
    verdict = one_sided_verdict(a, b)
    matches, findings = [], []
    for section in sorted(one.keys() | other.keys(), key=_section_order):
        if section in one and section in other:
            matches.append(_match_section(section, one[section], other[section]))
            continue
        side = 0 if section in one else 1
        borrowed = [
            _match_section(section, one[x], other[y], borrowed=counterpart)
            for counterpart in COUNTERPART_SECTIONS.get(section, ())
            for x, y in [(section, counterpart) if side == 0 else (counterpart, section)]
            if x in one and y in other
        ]
        matches += borrowed
        message = f"{section} appeared on only one side"
        if borrowed:
            sections = ", ".join(each.borrowed for each in borrowed)
            message += f"; its tensors are compared with the other side's {sections}"
        files = tuple(dict.fromkeys(str(entry.path) for entry in sides[side][section]))
        findings.append(ComparisonFinding("section", message, side, section, files, verdict))
    return matches, findings


def one_sided_verdict(a: Dump, b: Dump) -> Verdict:
    """Return the verdict on a section or stage that only one side has.

    Two runs of this project that do the same work record the same data: a section that one of them
    lacks was not computed, or not kept. Other formats have variants that hold different sections,
    and so do runs that were imported from them.
    """
    is_one_format = all(dump.kind == OWN and not _is_imported(dump) for dump in (a, b))
    return Verdict.NOT_COMPARABLE if is_one_format else Verdict.SAME


def _is_imported(dump: Dump) -> bool:
    names = dump.about.get("attempts")
    return isinstance(names, list) and any(
        str(name).rpartition("@")[2].startswith(KEY_PREFIX) for name in names
    )


def _section_order(section: str) -> tuple[bool, int, str]:
    sections = list(SECTIONS)
    position = sections.index(section) if section in sections else len(sections)
    return (section not in flow.SAMPLE_SECTIONS, position, section)


def _match_section(
    section: str, a: Sequence[DumpEntry], b: Sequence[DumpEntry], borrowed: str = ""
) -> SectionMatch:
    def is_unique(coordinate: str) -> bool:
        return all(
            len({getattr(entry.location, coordinate) for entry in side}) <= 1 for side in (a, b)
        )

    # Two frameworks name a stage differently, and step 5 of one run is step 0 of another's replay.
    # So a coordinate with at most one value on each side is not compared.
    ignored: dict[str, Any] = dict.fromkeys(filter(is_unique, ("step", "stage", "role")))
    common_locations = {e.location: e.location._replace(**ignored) for e in (*a, *b)}
    return SectionMatch(section, (tuple(a), tuple(b)), common_locations, borrowed)


def _entry_pairs(one: list[DumpEntry], other: list[DumpEntry]) -> Iterator[EntryPair]:
    if len(one) == len(other) == 1:
        yield one[0], other[0]
        return
    by_key = {entry.key or entry.path.name: entry for entry in other}
    yield from ((entry, by_key.pop(entry.key or entry.path.name, None)) for entry in one)
    yield from ((None, entry) for entry in by_key.values())


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
        pool = ThreadPoolExecutor(workers, THREADS)
        try:
            pending: collections.deque[Future[R]] = collections.deque()
            for task in tasks:
                pending.append(pool.submit(function, task))
                if len(pending) > workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:  # of an interrupted comparison, running tasks end by themselves
            pool.shutdown(wait=False, cancel_futures=True)

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
        match: the match that it is part of.
        pair: entries of one location, or of the same samples.
        has_no_counterpart: the pair is one entry; other parts of the other side hold its samples.
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
        """The pass that it is part of; a sample occurs once in a pass."""
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
        self, dumps: tuple[Dump, Dump], tolerances: Tolerances, mapper: Mapper, progress: Progress
    ) -> None:
        self._dumps = dumps
        self._tolerances = tolerances
        self._mapper = mapper
        self._progress = progress
        self._done = self._planned = 0
        self._by_files: dict[_Files, list[WorkItem]] = {}
        self._prefetched: dict[_ItemKey, TaskOutcome] = {}
        self.differing_samples: frozenset[str] = frozenset()
        """Labels of samples that are compared by tokens and masks alone."""

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
        """Return the outcome of each task; each runs alone."""
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

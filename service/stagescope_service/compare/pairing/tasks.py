"""Tasks that read and compare shards; tasks and their outcomes are small and picklable.

`compare_pair` reads two records of one location and compares them if their rows align. Otherwise it
describes what each holds (`ShardIndex`), and `join` finds out which rows pair. `compare_joined`
then compares one shard with its counterparts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stagescope_service.compare.flow import NAMED_SECTIONS
from stagescope_service.compare.pairing.contents_rows import (
    WHOLE_SEQUENCES,
    ContentsRows,
    mask_of_ranks,
)
from stagescope_service.compare.pairing.shard_comparison import (
    Box,
    ShardComparison,
    ValueCache,
    compare_boxes,
    compare_others,
    compare_rows,
    log_prob_noise,
)
from stagescope_service.compare.pairing.shard_index import (
    BY_RESPONSE,
    BY_ROW,
    ShardIndex,
    as_mapping,
    describe,
    ids_of,
    named_shard,
    row_label,
)
from stagescope_service.compare.pairing.token_alignment import RowPairing
from stagescope_service.compare.tolerances import Tolerances
from stagescope_service.dumps.records import Dump, DumpContents, DumpEntry, DumpProblem
from stagescope_service.rows.positions import POSITION_TENSORS
from stagescope_service.statistics.pairwise import Pairwise
from stagescope_wire.errors import ComparisonFailed, InvalidTensor, StagescopeError


@dataclasses.dataclass(frozen=True, slots=True)
class TaskOutcome:
    """Result of a task.

    Attributes:
        comparisons: the tensors and numbers that were compared.
        indexes: what each side holds, where the rows of the two do not align.
        in_order: row r of both sides is the same sample, by ids or tokens.
        unmatched_names: names of tensors and numbers that only one side has, of each side.
        log_prob_noise: of each side; see `log_prob_noise`.
        problems: (side, problem) of files that could not be read.
        left_out: (side, what a reader could not turn into tensors, why).
        bytes: number of bytes read.
    """

    comparisons: tuple[ShardComparison, ...] = ()
    indexes: tuple[ShardIndex | None, ShardIndex | None] = (None, None)
    in_order: bool = False
    unmatched_names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    log_prob_noise: tuple[Pairwise | None, Pairwise | None] = (None, None)
    problems: tuple[tuple[int, DumpProblem], ...] = ()
    left_out: tuple[tuple[int, str, str], ...] = ()
    bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PairTask:
    """Compare two records of one location.

    Attributes:
        dumps, entries: one of each side; an entry without a counterpart is only described.
        section: the section under which the comparisons are reported.
        tolerances, exclude: see `compare_rows`.
        index_only: describe the rows to join them later, and compare none.
        prefetch: the task runs early because another section of its files is read now. It is
            skipped where rows of these files did not align.
    """

    dumps: tuple[Dump, Dump]
    entries: tuple[DumpEntry | None, DumpEntry | None]
    section: str
    tolerances: Tolerances
    exclude: frozenset[str] = frozenset()
    index_only: bool = False
    prefetch: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Counterpart:
    """The rows, or boxes of named tensors, of a second shard that pair with those of the first."""

    entry: DumpEntry
    pairing: RowPairing | None = None
    boxes: tuple[tuple[str, tuple[Box, Box]], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class JoinTask:
    """Compare one shard with its counterparts; only one of them is in memory at a time."""

    dumps: tuple[Dump, Dump]
    entry: DumpEntry
    counterparts: tuple[Counterpart, ...]
    section: str
    tolerances: Tolerances
    exclude: frozenset[str] = frozenset()

    @property
    def entries(self) -> tuple[DumpEntry, None]:
        """The first entry: the only one that is in memory throughout."""
        return (self.entry, None)


@dataclasses.dataclass
class _FileCache:
    """Data that the tasks of the same files share.

    Attributes:
        records: records read so far; as long as they live their files stay mapped.
        files: files read so far.
        values: see `compare_rows`.
    """

    records: list[DumpContents | None] = dataclasses.field(default_factory=list)
    files: set[Path] = dataclasses.field(default_factory=set)
    values: ValueCache = dataclasses.field(default_factory=dict)

    def bytes_of_new_files(self, entries: Sequence[DumpEntry | None]) -> int:
        """Return the bytes of the entries' files that were not read before."""
        files = {entry.path: entry.bytes for entry in entries if entry is not None}
        new = files.keys() - self.files
        self.files |= new
        return sum(files[path] for path in new)


def run_tasks(tasks: Sequence[PairTask | JoinTask]) -> tuple[TaskOutcome | None, ...]:
    """Run tasks on the same files one after the other, so that each file is mapped once.

    Returns:
        The outcome of each task, None if it was skipped; see `PairTask.prefetch`.

    Raises:
        ComparisonFailed: an error that is no fault of the files.
    """
    cache, outcomes, is_aligned = _FileCache(), list[TaskOutcome | None](), True
    for task in tasks:
        is_prefetch = isinstance(task, PairTask) and task.prefetch
        outcome = _run_task(task, cache) if is_aligned or not is_prefetch else None
        is_aligned = is_aligned and outcome is not None and not any(outcome.indexes)
        outcomes.append(outcome)
    return tuple(outcomes)


def _run_task(task: PairTask | JoinTask, cache: _FileCache) -> TaskOutcome:
    """Run one task; problems of its files are part of its outcome.

    Raises:
        ComparisonFailed: any other error, which is no fault of the files.
    """
    try:
        return compare_pair(task, cache) if isinstance(task, PairTask) else compare_joined(task)
    except StagescopeError as error:  # raised by the comparison, not by a reader
        side, entry = next((at, entry) for at, entry in enumerate(task.entries) if entry)
        text = f"{entry.path} could not be compared: {error}"
        return TaskOutcome(problems=((side, DumpProblem(entry.path, "damaged", text, entry)),))
    except Exception as error:
        paths = " and ".join(str(entry.path) for entry in task.entries if entry)
        raise ComparisonFailed(
            f"{paths} could not be compared: {type(error).__name__}: {error}",
            advice="the files may be sound; if memory is short, compare one --step",
        ) from error


def compare_pair(task: PairTask, cache: _FileCache) -> TaskOutcome:
    """Compare two records of one location, or describe what they hold."""
    problems: list[tuple[int, DumpProblem]] = []
    records = [
        None if entry is None else _read(dump, entry, side, problems)
        for side, (dump, entry) in enumerate(zip(task.dumps, task.entries, strict=True))
    ]
    cache.records += records
    one, other = records
    size = cache.bytes_of_new_files(task.entries)
    left_out = tuple(
        (side, name, str(why))
        for side, record in enumerate(records)
        if record is not None
        for name, why in as_mapping(record.about.get("left_out")).items()
    )
    found = TaskOutcome(problems=tuple(problems), left_out=left_out, bytes=size)
    if one is None or other is None:
        index_a, index_b = (
            None if each is None else describe(ContentsRows(each)) for each in records
        )
        return dataclasses.replace(found, indexes=(index_a, index_b))
    a, b = (_rows_of(*each) for each in zip(task.dumps, (one, other), strict=True))
    comparisons = compare_others(a, b, task.tolerances)
    pairing = None if task.index_only else pair_aligned_rows(a, b)
    indexes: tuple[ShardIndex | None, ShardIndex | None] = (None, None)
    if pairing is None:
        indexes = (describe(a), describe(b))
    else:
        comparisons += compare_rows(
            a, b, pairing, task.tolerances, exclude=task.exclude, cache=cache.values
        )
    if task.section in NAMED_SECTIONS:
        unequal_shapes = {each.name for each in comparisons if each.shapes_differ}
        comparisons = [each for each in comparisons if each.name not in unequal_shapes]
        indexes = (_index_unpaired(a, b, unequal_shapes), _index_unpaired(b, a, unequal_shapes))
    names = [set(record.tensors) | set(record.numbers) for record in (one, other)]
    return dataclasses.replace(
        found,
        comparisons=_of_section(comparisons, task.section),
        indexes=indexes,
        in_order=pairing is not None and pairing.in_order and pairing.key != BY_ROW,
        unmatched_names=(tuple(sorted(names[0] - names[1])), tuple(sorted(names[1] - names[0]))),
        log_prob_noise=(log_prob_noise(a), log_prob_noise(b)),
    )


def compare_joined(task: JoinTask) -> TaskOutcome:
    """Compare one shard with its counterparts."""
    problems: list[tuple[int, DumpProblem]] = []
    comparisons: list[ShardComparison] = []
    record = _read(task.dumps[0], task.entry, 0, problems)
    if record is not None:
        rows = _rows_of(task.dumps[0], record)
        for counterpart in task.counterparts:
            comparisons += _compare_counterpart(task, rows, counterpart, problems)
    size = task.entry.bytes + sum(each.entry.bytes for each in task.counterparts)
    return TaskOutcome(_of_section(comparisons, task.section), problems=tuple(problems), bytes=size)


def _of_section(
    comparisons: Sequence[ShardComparison], section: str
) -> tuple[ShardComparison, ...]:
    return tuple(dataclasses.replace(each, section=section) for each in comparisons)


def _compare_counterpart(
    task: JoinTask,
    a: ContentsRows,
    counterpart: Counterpart,
    problems: list[tuple[int, DumpProblem]],
) -> list[ShardComparison]:
    """Compare with one counterpart, which is released before the next is read."""
    other = _read(task.dumps[1], counterpart.entry, 1, problems)
    if other is None:
        return []
    comparisons = [
        compare_boxes(a.record, other, name, boxes, task.tolerances)
        for name, boxes in counterpart.boxes
    ]
    if (pairing := counterpart.pairing) is not None:
        b = _rows_of(task.dumps[1], other)
        comparisons += compare_rows(a, b, pairing, task.tolerances, exclude=task.exclude)
    return comparisons


def _rows_of(dump: Dump, record: DumpContents) -> ContentsRows:
    """Return a record's rows; rows of a whole step use its ranks' masks if they lack one."""
    if record.entry.location.rank is not None:
        return ContentsRows(record)
    return ContentsRows(record, lambda rows: mask_of_ranks(dump, record.entry, rows))


def pair_aligned_rows(a: ContentsRows, b: ContentsRows) -> RowPairing | None:
    """Pair the rows of two records of one location.

    None where their rows are not the same samples, or the two records alone do not show it.
    """
    if a.count is None or b.count is None:
        return _identity(0, (), BY_ROW) if a.count == b.count else None
    positions = [name for name in POSITION_TENSORS if name in a.names or name in b.names]
    if (a.has_fragments or b.has_fragments) and not all(
        name in a.names and name in b.names and _has_same_values(a, b, name) for name in positions
    ):
        return None
    all_ids_a, all_ids_b = ids_of(a.record), ids_of(b.record)
    if kind := next((kind for kind in all_ids_a if kind in all_ids_b), None):
        ids_a, ids_b = all_ids_a[kind], all_ids_b[kind]
        if ids_a == ids_b:
            return _identity(len(ids_a), ids_a, kind)
        row_of_id = {key: row for row, key in enumerate(ids_b)}
        if len(row_of_id) == len(ids_b) and sorted(ids_a) == sorted(ids_b):
            rows_b = np.array([row_of_id[key] for key in ids_a], np.int64)
            return RowPairing(np.arange(len(ids_a)), rows_b, ids_a, kind)
        return None
    if a.count != b.count:
        return None
    labels = tuple(row_label(a.record.entry.location, row) for row in range(a.count))
    shared = set(a.names).intersection(b.names)
    tokens = next((name for name in ("responses", *WHOLE_SEQUENCES) if name in shared), None)
    if tokens is None:
        return _identity(a.count, labels, BY_ROW)
    if _has_same_values(a, b, tokens) or a.content_hashes()[0] == b.content_hashes()[0]:
        return _identity(a.count, labels, BY_RESPONSE)
    return None


def _read(
    dump: Dump, entry: DumpEntry, side: int, problems: list[tuple[int, DumpProblem]]
) -> DumpContents | None:
    try:
        record = dump.read(entry)
    except (OSError, StagescopeError) as error:
        problems.append((side, DumpProblem.from_error(entry.path, error, entry)))
        return None
    problems += [(side, problem) for problem in record.problems]
    _check_offsets(record)
    return record


def _check_offsets(record: DumpContents) -> None:
    for name, (_, _, values, offsets) in record.tensors.items():
        if offsets is None:
            continue
        if not len(offsets) or np.any(np.diff(offsets, prepend=0) < 0) or offsets[-1] > len(values):
            raise InvalidTensor(
                f"{record.entry.path}: the rows of {name} do not follow each other",
                expected=f"offsets that rise from 0 to at most {len(values)}",
            )


def _index_unpaired(
    one: ContentsRows, other: ContentsRows, unequal_shapes: set[str]
) -> ShardIndex | None:
    """Index the named tensors of a record that could not be compared with its counterpart's."""
    missing = [name for name in one.record.tensors if name not in other.record.tensors]
    names = (*missing, *sorted(unequal_shapes))
    named = {name: named_shard(one.record, name) for name in names}
    return ShardIndex(one.record.entry, named=named) if named else None


def _identity(count: int, labels: Sequence[str], kind: str) -> RowPairing:
    every = np.arange(count)
    return RowPairing(every, every, tuple(labels), kind, in_order=True)


def _has_same_values(a: ContentsRows, b: ContentsRows, name: str) -> bool:
    one, other = a.tensor(name), b.tensor(name)
    return np.array_equal(one.offsets, other.offsets) and np.array_equal(one.flat, other.flat)

"""What is done where shards are read: a task and its answer are small and travel anywhere.

`compare_pair` reads two records that were made at the same place and compares them where they are
laid out alike; where they are not it says what each holds (`ShardIndex`), and `align` finds out
which rows pair. `compare_joined` then compares one shard with the parts of others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stagescope.wire.errors import ComparisonFailed, InvalidTensor, StagescopeError
from stagescope_service.compare.flow import NAMED
from stagescope_service.compare.pairing.index import (
    RESPONSE,
    ROW,
    RUN,
    SAMPLE,
    ShardIndex,
    describe,
    mapping,
    named_shard,
    row_label,
    runs_of,
    samples_of,
)
from stagescope_service.compare.pairing.pieces import (
    Box,
    Known,
    Piece,
    compare_boxes,
    compare_others,
    compare_rows,
    noise_floor,
)
from stagescope_service.compare.pairing.rows import WHOLE, Rows
from stagescope_service.compare.pairing.token_alignment import Pairing
from stagescope_service.compare.tolerances import Tolerances
from stagescope_service.dumps.records import Dump, Entry, Problem, Record
from stagescope_service.statistics.pairwise import Pairwise

Int64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a task found.

    Attributes:
        pieces: what was compared.
        index: of each side, where they are not laid out alike.
        in_order: their rows are the same samples, row by row: ids or tokens say so.
        only: names of tensors and numbers that one side alone has, of each side.
        floors: of each side; see `noise_floor`.
        problems: (side, what is wrong), of files that could not be read.
        left_out: (side, what a reader could not put into tensors, why).
        bytes: read.
    """

    pieces: tuple[Piece, ...] = ()
    index: tuple[ShardIndex | None, ShardIndex | None] = (None, None)
    in_order: bool = False
    only: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    floors: tuple[Pairwise | None, Pairwise | None] = (None, None)
    problems: tuple[tuple[int, Problem], ...] = ()
    left_out: tuple[tuple[int, str, str], ...] = ()
    bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PairTask:
    """Compare two records of one place.

    Attributes:
        dumps, entries: of each side; of an entry alone only what it holds is said.
        section: under which it is reported.
        tolerances, exclude: see `compare_rows`.
        joined: rows are not compared here: it is said what they are, and they are joined.
        ahead: asked for early, since the files are read for another section; left undone where
            what was compared of them before does not lie alike.
    """

    dumps: tuple[Dump, Dump]
    entries: tuple[Entry | None, Entry | None]
    section: str
    tolerances: Tolerances
    exclude: frozenset[str] = frozenset()
    joined: bool = False
    ahead: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Which rows, or boxes of named tensors, of a second shard pair with those of the first."""

    entry: Entry
    pairing: Pairing | None = None
    boxes: tuple[tuple[str, tuple[Box, Box]], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class JoinTask:
    """Compare one shard with the parts of others that pair with it; one of them at a time."""

    dumps: tuple[Dump, Dump]
    entry: Entry
    parts: tuple[Part, ...]
    section: str
    tolerances: Tolerances
    exclude: frozenset[str] = frozenset()


@dataclasses.dataclass
class _Held:
    """What the tasks of the same files share.

    Attributes:
        records: read already; while they are there their files stay mapped.
        files: that were read already.
        known: see `compare_rows`.
    """

    records: list[Record | None] = dataclasses.field(default_factory=list)
    files: set[Path] = dataclasses.field(default_factory=set)
    known: Known = dataclasses.field(default_factory=dict)

    def bytes_of(self, entries: Sequence[Entry | None]) -> int:
        """Return the bytes of the files of entries, but of those that were read before."""
        files = {entry.path: entry.bytes for entry in entries if entry is not None}
        new = files.keys() - self.files
        self.files |= new
        return sum(files[path] for path in new)


def run_tasks(tasks: Sequence[PairTask | JoinTask]) -> tuple[Outcome | None, ...]:
    """Do tasks on the same files, one after the other: each file is mapped once for all.

    Returns:
        The outcome of each, None of one that was left undone; see `PairTask.ahead`.

    Raises:
        ComparisonFailed: what says nothing about the files.
    """
    held, outcomes, alike = _Held(), list[Outcome | None](), True
    for task in tasks:
        is_ahead = isinstance(task, PairTask) and task.ahead
        outcome = _run_task(task, held) if alike or not is_ahead else None
        alike = alike and outcome is not None and not any(outcome.index)
        outcomes.append(outcome)
    return tuple(outcomes)


def _run_task(task: PairTask | JoinTask, held: _Held) -> Outcome:
    """Do one task; what is wrong with its files is in its answer, so that the others go on.

    Raises:
        ComparisonFailed: anything else, which says nothing about the files.
    """
    try:
        return compare_pair(task, held) if isinstance(task, PairTask) else compare_joined(task)
    except StagescopeError as error:  # a reader let it through
        entries = task.entries if isinstance(task, PairTask) else (task.entry, None)
        side = 0 if entries[0] is not None else 1
        entry = entries[side]
        assert entry is not None
        text = f"{entry.path} could not be compared: {error}"
        return Outcome(problems=((side, Problem(entry.path, "damaged", text, entry)),))
    except Exception as error:
        entries = task.entries if isinstance(task, PairTask) else (task.entry, None)
        paths = " and ".join(str(entry.path) for entry in entries if entry is not None)
        raise ComparisonFailed(
            f"{paths} could not be compared: {type(error).__name__}: {error}",
            advice="this says nothing about the files; of too little memory, compare one --step",
        ) from error


def compare_pair(task: PairTask, held: _Held) -> Outcome:
    """Compare two records of one place, or say what they hold."""
    problems: list[tuple[int, Problem]] = []
    records = [
        None if entry is None else _read(dump, entry, side, problems)
        for side, (dump, entry) in enumerate(zip(task.dumps, task.entries, strict=True))
    ]
    held.records += records
    one, other = records
    size = held.bytes_of(task.entries)
    left_out = tuple(
        (side, name, str(why))
        for side, record in enumerate(records)
        if record is not None
        for name, why in mapping(record.about.get("left_out")).items()
    )
    if one is None or other is None:
        described = tuple(None if each is None else describe(Rows(each)) for each in records)
        return Outcome(
            index=(described[0], described[1]), problems=tuple(problems), left_out=left_out,
            bytes=size,
        )  # fmt: skip
    a, b = Rows(one), Rows(other)
    pieces = compare_others(a, b, task.tolerances)
    pairing = None if task.joined else pair_alike(a, b)
    if pairing is not None:
        pieces += compare_rows(
            a, b, pairing, task.tolerances, exclude=task.exclude, known=held.known
        )
    index: tuple[ShardIndex | None, ShardIndex | None] = (None, None)
    if pairing is None:
        index = (describe(a), describe(b))
    if task.section in NAMED:
        apart = {piece.name for piece in pieces if piece.shapes_differ}
        pieces = [piece for piece in pieces if piece.name not in apart]
        index = (_named_apart(a, b, apart), _named_apart(b, a, apart))
    names = [set(record.tensors) | set(record.numbers) for record in (one, other)]
    return Outcome(
        pieces=_of_section(pieces, task.section),
        index=index,
        in_order=pairing is not None and pairing.in_order and pairing.key != ROW,
        only=(tuple(sorted(names[0] - names[1])), tuple(sorted(names[1] - names[0]))),
        floors=(noise_floor(a), noise_floor(b)), problems=tuple(problems), left_out=left_out,
        bytes=size,
    )  # fmt: skip


def compare_joined(task: JoinTask) -> Outcome:
    """Compare one shard with the parts of others."""
    problems: list[tuple[int, Problem]] = []
    one = _read(task.dumps[0], task.entry, 0, problems)
    pieces: list[Piece] = []
    if one is not None:
        a = Rows(one)
        for part in task.parts:
            pieces += _compare_part(task, a, part, problems)
    size = task.entry.bytes + sum(part.entry.bytes for part in task.parts)
    return Outcome(pieces=_of_section(pieces, task.section), problems=tuple(problems), bytes=size)


def _of_section(pieces: Sequence[Piece], section: str) -> tuple[Piece, ...]:
    return tuple(
        piece if piece.section == section else dataclasses.replace(piece, section=section)
        for piece in pieces
    )


def _compare_part(
    task: JoinTask, a: Rows, part: Part, problems: list[tuple[int, Problem]]
) -> list[Piece]:
    """Compare with one other shard, which is let go before the next is read."""
    other = _read(task.dumps[1], part.entry, 1, problems)
    if other is None:
        return []
    pieces = [
        compare_boxes(a.record, other, name, boxes, task.tolerances) for name, boxes in part.boxes
    ]
    if part.pairing is not None:
        b = Rows(other)
        pieces += compare_rows(a, b, part.pairing, task.tolerances, exclude=task.exclude)
    return pieces


def pair_alike(a: Rows, b: Rows) -> Pairing | None:
    """Return which rows of two records of one place are the same samples.

    None where their rows are not the same samples, or it cannot be known from the two alone.
    """
    if a.count is None or b.count is None:
        return _identity(0, (), ROW) if a.count == b.count else None
    if (a.has_fragments or b.has_fragments) and not all(
        name in a.names and name in b.names and _same_values(a, b, name)
        for name in ("positions", "token_offset")
        if name in a.names or name in b.names
    ):
        return None
    for kind, keys in ((SAMPLE, samples_of), (RUN, runs_of)):
        ids_a, ids_b = keys(a.record), keys(b.record)
        if ids_a is None or ids_b is None:
            continue
        if ids_a == ids_b:
            return _identity(len(ids_a), ids_a, kind)
        places = {key: row for row, key in enumerate(ids_b)}
        if len(places) == len(ids_b) and sorted(ids_a) == sorted(ids_b):
            rows_b = np.array([places[key] for key in ids_a], np.int64)
            return Pairing(np.arange(len(ids_a)), rows_b, ids_a, kind)
        return None
    if a.count != b.count:
        return None
    labels = tuple(row_label(a.record.entry.place, row) for row in range(a.count))
    tokens = [name for name in ("responses", *WHOLE) if name in a.names]
    tokens = [name for name in tokens if name in b.names]
    if not tokens:
        return _identity(a.count, labels, ROW)
    if _same_values(a, b, tokens[0]) or a.content()[0] == b.content()[0]:
        return _identity(a.count, labels, RESPONSE)
    return None


def _read(
    dump: Dump, entry: Entry, side: int, problems: list[tuple[int, Problem]]
) -> Record | None:
    try:
        record = dump.read(entry)
    except (OSError, StagescopeError) as error:
        problems.append((side, Problem.of(entry.path, error, entry)))
        return None
    _check_offsets(record)
    return record


def _check_offsets(record: Record) -> None:
    for name, (_, _, values, offsets) in record.tensors.items():
        if offsets is None:
            continue
        if not len(offsets) or np.any(np.diff(offsets, prepend=0) < 0) or offsets[-1] > len(values):
            raise InvalidTensor(
                f"{record.entry.path}: the rows of {name} do not follow each other",
                expected=f"offsets that rise from 0 to at most {len(values)}",
            )


def _named_apart(one: Rows, other: Rows, apart: set[str]) -> ShardIndex | None:
    """Return the tensors of a record that could not be held against those of its counterpart."""
    left = [name for name in one.record.tensors if name not in other.record.tensors]
    named = {name: named_shard(one.record, name) for name in (*left, *sorted(apart))}
    return ShardIndex(one.record.entry, named=named) if named else None


def _identity(count: int, labels: Sequence[str], kind: str) -> Pairing:
    every = np.arange(count)
    return Pairing(every, every, tuple(labels), kind, in_order=True)


def _same_values(a: Rows, b: Rows, name: str) -> bool:
    one, other = a.known(name), b.known(name)
    return np.array_equal(one.offsets, other.offsets) and np.array_equal(one.flat, other.flat)

"""The rows of a step and the parts that hold them: aligned by sample id, else by position."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from stagescope.wire.schema import Part
from stagescope_service.dumps.records import DumpContents, DumpEntry, mapping
from stagescope_service.rows.positions import has_positions
from stagescope_service.rows.ragged import Int64, unpack
from stagescope_service.store.tensorfile import WireTensor

Shape: TypeAlias = "tuple[str, tuple[int, ...]]"
"""(dtype tag, shape)"""


@dataclasses.dataclass(eq=False)
class RecordedPart:
    """One part of one stage of one rank, recorded in one or several entries.

    Attributes:
        count: number of its rows.
        texts: other texts of each row, by name.
        shapes: of its tensors that have rows, side by side.
        about: `DumpContents.about` of its entries.
        rows: their indices among the step's rows; None if unknown.
        consumed: of a rollout that several steps consumed: the indices, in this part, of the rows
            that this step consumed; None: all.
        is_whole: its rows are complete samples, each once, not fragments of them, as
            context-parallel ranks and split samples have.
        checksum: of its tensors, where a layout says that samples may be split and no tensor how.
        span: of fragments, one more than the last position of their tokens; None if unknown.
    """

    stage: str
    role: str | None
    rank: int | None
    part: Part
    data_rank: int | None = None
    entries: list[DumpEntry] = dataclasses.field(default_factory=list)
    count: int = 0
    samples: tuple[str, ...] | None = None
    texts: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    shapes: dict[str, Shape] = dataclasses.field(default_factory=dict)
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)
    about: Mapping[str, object] = dataclasses.field(default_factory=dict)
    rows: Int64 | None = None
    consumed: Int64 | None = None
    is_whole: bool = True
    checksum: str = ""
    span: int | None = None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" {self.role or 'rank'} {self.rank}"
        return f"{self.stage}{rank}" + ("" if self.part == Part() else f" part {self.part}")

    @property
    def has_positions(self) -> bool:
        """Whether it recorded the positions of its tokens in their samples."""
        return has_positions(self.shapes)

    @property
    def context_ranks(self) -> int:
        """How many context-parallel ranks share a sample, according to the rank's layout."""
        size = self._layout.get("cp_size")
        return size if isinstance(size, int) else 1

    @property
    def context_rank(self) -> object:
        """Its context-parallel rank."""
        return self._layout.get("cp_rank")

    @property
    def process(self) -> dict[str, object]:
        """What its files say of the process that recorded it."""
        job = mapping(self.about, "job")
        names = ("policy_version", "data_rank", "layout")
        return {name: job[name] for name in names if job.get(name) is not None}

    @property
    def _layout(self) -> Mapping[str, object]:
        return mapping(mapping(self.about, "job"), "layout")

    def unpack(self, record: DumpContents) -> dict[str, WireTensor]:
        """Return a record's tensors; `cu_seqlens` becomes the row offsets of the others."""
        return unpack(record.tensors)


class RowIndex:
    """The step's rows in the order of their first occurrence: by sample id, else by position."""

    def __init__(self) -> None:
        self._by_sample: dict[str, int] = {}
        self._names: list[str] = []
        self._stages: list[tuple[dict[int | None, int], dict[int | None, Int64]]] = []

    def __len__(self) -> int:
        return len(self._names)

    def name(self, row: int) -> str:
        """Return the display name of a row."""
        return self._names[row]

    @property
    def samples(self) -> tuple[str, ...]:
        """sample_uid of each row, or a name from its rank and position."""
        return tuple(self._names)

    def assign(self, parts: Sequence[RecordedPart]) -> bool:
        """Set the rows of the parts of one pass of a stage; False if they cannot be determined."""
        if all(part.samples is not None for part in parts):
            for part in parts:
                rows = [self._row_of(sample) for sample in part.samples or ()]
                part.rows = np.array(rows, np.int64)
            _mark_fragments(parts)
        elif not self._assign_by_position(parts):
            return False
        if all(part.part == parts[0].part for part in parts):
            assigned = {p.data_rank: p.rows for p in parts if p.rows is not None}
            self._stages.append(({rank: len(rows) for rank, rows in assigned.items()}, assigned))
        return True

    def select_consumed(self, part: RecordedPart) -> None:
        """Set the rows of a rollout's part to those that the step consumed of it."""
        rows = np.array([self._by_sample.get(name, -1) for name in part.samples or ()], np.int64)
        part.consumed = np.flatnonzero(rows >= 0)
        part.rows = rows[part.consumed]
        part.texts = {n: tuple(t[row] for row in part.consumed) for n, t in part.texts.items()}

    def _row_of(self, sample: str) -> int:
        row = self._by_sample.setdefault(sample, len(self._names))
        if row == len(self._names):
            self._names.append(sample)
        return row

    def _assign_by_position(self, parts: Sequence[RecordedPart]) -> bool:
        by_rank: dict[int | None, list[RecordedPart]] = {}
        for part in parts:
            of_rank = by_rank.setdefault(part.data_rank, [])
            if not any((p.part == part.part) for p in of_rank):  # a replica holds the same rows
                of_rank.append(part)
        counts = {rank: sum(part.count for part in of_rank) for rank, of_rank in by_rank.items()}
        assigned = next((rows for sizes, rows in self._stages if sizes == counts), None)
        if assigned is None:
            if self._names:
                return False
            assigned = {}
            for rank, count in counts.items():
                assigned[rank] = np.arange(len(self._names), len(self._names) + count)
                prefix = "row" if rank is None else f"rank {rank} row"
                self._names += [f"{prefix} {row}" for row in range(count)]
        for part in parts:
            before = [p for p in by_rank[part.data_rank] if p.part < part.part]
            first = sum(p.count for p in before)
            part.rows = assigned[part.data_rank][first : first + part.count]
        return True


def _mark_fragments(parts: Sequence[RecordedPart]) -> None:
    holders: dict[int, RecordedPart] = {}
    for part in parts:
        assert part.rows is not None
        rows = part.rows.tolist()
        part.is_whole = len(set(rows)) == len(rows)
        before = {id(holders[row]): holders[row] for row in rows if row in holders}.values()
        if part.has_positions:
            split = any(other.data_rank != part.data_rank for other in before)
            part.is_whole &= not split and part.context_ranks < 2
        elif any(other.checksum != part.checksum for other in before):  # equal ones are replicas
            part.is_whole = False
        if not part.is_whole:
            for other in before:  # the first fragment of a sample is one, too
                other.is_whole = False
        holders |= dict.fromkeys(rows, part)


def rows_lacking_ranks(parts: Sequence[RecordedPart]) -> list[int]:
    """Return the rows of a pass that lack some of their context-parallel ranks."""
    ranks: dict[int, set[object]] = {}
    sizes: dict[int, int] = {}
    for part in parts:
        for row in part.rows.tolist() if part.rows is not None and not part.is_whole else ():
            ranks.setdefault(row, set()).add(part.context_rank)
            sizes[row] = part.context_ranks
    return [row for row, found in ranks.items() if len(found) < sizes[row]]

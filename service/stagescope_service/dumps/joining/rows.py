"""The rows of a step, and the parts that hold them: by sample id, else by place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from stagescope.wire.schema import Part
from stagescope_service.dumps.joining.column import Int64
from stagescope_service.dumps.joining.fragments import PLACES
from stagescope_service.dumps.records import Entry, Record
from stagescope_service.store.tensorfile import WireTensor

Shape = tuple[str, tuple[int, ...]]

_PACKED: Final = "cu_seqlens"


@dataclasses.dataclass(eq=False)
class FoundPart:
    """One part of one stage of one rank, in one or several entries.

    Attributes:
        count: rows that it holds.
        rows: which of the step's they are; None where that is not known.
        is_once: its rows are whole samples, each once: not pieces of them, as context-parallel
            ranks and split samples have.
        digest: of its tensors, where a layout says that samples may be split and no tensor how.
        span: of pieces, one more than the last position of their tokens; None: it is not said.
        shapes: of its tensors that have rows, side by side.
        said: `Record.about`.
        chosen: which of its rows are the step's, of a rollout that several steps consumed; None:
            all.
    """

    stage: str
    role: str | None
    rank: int | None
    part: Part
    data_rank: int | None = None
    entries: list[Entry] = dataclasses.field(default_factory=list)
    count: int = 0
    samples: tuple[str, ...] | None = None
    texts: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    shapes: dict[str, Shape] = dataclasses.field(default_factory=dict)
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)
    said: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rows: Int64 | None = None
    chosen: Int64 | None = None
    is_once: bool = True
    digest: str = ""
    span: int | None = None

    def __str__(self) -> str:
        who = "" if self.rank is None else f" {self.role or 'rank'} {self.rank}"
        return f"{self.stage}{who}" + ("" if self.part == Part() else f" part {self.part}")

    @property
    def is_placed(self) -> bool:
        """Whether it recorded where its tokens lie in their samples."""
        return not PLACES.isdisjoint(self.shapes)

    @property
    def context_ranks(self) -> int:
        """How many context-parallel ranks share a sample, as its rank's layout says."""
        layout = (self.said.get("job") or {}).get("layout")
        size = layout.get("cp_size") if isinstance(layout, Mapping) else None
        return size if isinstance(size, int) else 1

    @property
    def context_rank(self) -> object:
        """Which of them it is."""
        layout = (self.said.get("job") or {}).get("layout")
        return layout.get("cp_rank") if isinstance(layout, Mapping) else None

    def unpacked(self, record: Record) -> dict[str, WireTensor]:
        """Return a record's tensors; `cu_seqlens` has become the others' row offsets."""
        packed = record.tensors.get(_PACKED)
        if packed is None:
            return dict(record.tensors)
        offsets = packed[2].reshape(-1).astype(np.int64)
        return {
            name: (tag, shape, values, offsets)
            if shape and shape[0] == offsets[-1] and own is None
            else (tag, shape, values, own)
            for name, (tag, shape, values, own) in record.tensors.items()
            if name != _PACKED
        }


class Rows:
    """The step's rows in the order in which they were met: by sample id, else by place."""

    def __init__(self) -> None:
        self._by_sample: dict[str, int] = {}
        self._names: list[str] = []
        self._stages: list[tuple[dict[int | None, int], dict[int | None, Int64]]] = []

    def __len__(self) -> int:
        return len(self._names)

    def name(self, row: int) -> str:
        """Return what a row is called."""
        return self._names[row]

    @property
    def samples(self) -> tuple[str, ...]:
        """sample_uid of each row, or a name by its place."""
        return tuple(self._names)

    def place(self, parts: Sequence[FoundPart]) -> bool:
        """Give the parts of one pass of a stage their rows; False: they cannot be known."""
        if all(part.samples is not None for part in parts):
            for part in parts:
                part.rows = np.array([self._of(sample) for sample in part.samples or ()], np.int64)
            _mark_pieces(parts)
        elif not self._by_place(parts):
            return False
        if all(part.part == parts[0].part for part in parts):
            known = {p.data_rank: p.rows for p in parts if p.rows is not None}
            self._stages.append(({rank: len(rows) for rank, rows in known.items()}, known))
        return True

    def choose(self, part: FoundPart) -> None:
        """Give the part of a rollout the rows that the step consumed of it."""
        known = [self._by_sample.get(sample, -1) for sample in part.samples or ()]
        part.chosen = np.flatnonzero(np.array(known, np.int64) >= 0)
        part.rows = np.array(known, np.int64)[part.chosen]
        part.texts = {n: tuple(t[at] for at in part.chosen) for n, t in part.texts.items()}

    def _of(self, sample: str) -> int:
        row = self._by_sample.setdefault(sample, len(self._names))
        if row == len(self._names):
            self._names.append(sample)
        return row

    def _by_place(self, parts: Sequence[FoundPart]) -> bool:
        of_ranks: dict[int | None, list[FoundPart]] = {}
        for part in parts:
            pieces = of_ranks.setdefault(part.data_rank, [])
            if not any((p.part == part.part) for p in pieces):  # a replica holds the same rows
                pieces.append(part)
        counts = {rank: sum(part.count for part in of) for rank, of in of_ranks.items()}
        known = next((rows for sizes, rows in self._stages if sizes == counts), None)
        if known is None:
            if self._names:
                return False
            known = {}
            for rank, count in counts.items():
                known[rank] = np.arange(len(self._names), len(self._names) + count)
                prefix = "row" if rank is None else f"rank {rank} row"
                self._names += [f"{prefix} {row}" for row in range(count)]
        for part in parts:
            before = [p for p in of_ranks[part.data_rank] if p.part < part.part]
            first = sum(p.count for p in before)
            part.rows = known[part.data_rank][first : first + part.count]
        return True


def _mark_pieces(parts: Sequence[FoundPart]) -> None:
    held: dict[int, FoundPart] = {}
    for part in parts:
        assert part.rows is not None
        rows = part.rows.tolist()
        part.is_once = len(set(rows)) == len(rows)
        before = {id(held[row]): held[row] for row in rows if row in held}.values()
        if part.is_placed:
            split = any(other.data_rank != part.data_rank for other in before)
            part.is_once &= not split and part.context_ranks < 2
        elif any(other.digest != part.digest for other in before):  # the same are replicas
            part.is_once = False
        if not part.is_once:
            for other in before:  # the first of a sample's pieces is one, too
                other.is_once = False
        held |= dict.fromkeys(rows, part)


def lacking_ranks(parts: Sequence[FoundPart]) -> list[int]:
    """Return the rows of a pass of which not every context-parallel rank is there."""
    ranks: dict[int, set[object]] = {}
    sizes: dict[int, int] = {}
    for part in parts:
        for row in part.rows.tolist() if part.rows is not None and not part.is_once else ():
            ranks.setdefault(row, set()).add(part.context_rank)
            sizes[row] = part.context_ranks
    return [row for row, found in ranks.items() if len(found) < sizes[row]]

"""The rows of a step and the parts that hold them, and each column of values by those rows.

Rows are aligned by sample id, else by position.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from stagescope_service.dumps.records import DumpEntry, mapping
from stagescope_service.rows.positions import TokenPositions, has_positions
from stagescope_service.rows.ragged import Bools, Int64, RowBlock, is_in_row
from stagescope_wire.batch import Padding, Tensor, widened
from stagescope_wire.schema import Part
from stagescope_wire.tensorfile import CODES, Array

Shape: TypeAlias = "tuple[str, tuple[int, ...]]"
"""(dtype tag, shape)"""


@dataclasses.dataclass(eq=False)
class RecordedPart:
    """One part of one stage of one rank, recorded in one or several entries.

    Attributes:
        count: number of its rows.
        texts: other texts of each row, by name.
        shapes: shapes of its tensors that have rows, side by side.
        about: `DumpContents.about` of its entries.
        rows: their indices among the step's rows; None if unknown.
        consumed: indices, in this part, of the rows that this step consumed, if several steps
            consumed a rollout; None: all.
        is_whole: its rows are complete samples, each once. Context-parallel ranks and split samples
            have fragments instead.
        checksum: checksum of its tensors, if a layout allows split samples and no tensor says how.
        span: one more than the last position of the fragments' tokens; None if unknown.
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
        """Fields in its files about the process that recorded it."""
        job = mapping(self.about, "job")
        names = ("policy_version", "data_rank", "layout")
        return {name: job[name] for name in names if job.get(name) is not None}

    @property
    def _layout(self) -> Mapping[str, object]:
        return mapping(mapping(self.about, "job"), "layout")


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
        """Limit a rollout's part to the rows that the step consumed."""
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
        if has_positions(part.shapes):
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


Allocate: TypeAlias = "Callable[[tuple[int, ...], np.dtype[Any]], Array]"
"""Returns an array of this shape and of any dtype; its values are undefined."""

_NAN: Final = {"bfloat16": 0x7FC0}

_FILLED: Final = 1
_COUNTED: Final = 2
"""States of a token of an `Assembly`."""


class Column:
    """A tensor of all rows; each row is written once, and later copies are compared with it.

    Args:
        tag: dtype tag.
        shape: [rows], or [rows, width, ...] of the widest block.
        side: on which rows are padded, 'left' or 'right'.
        first: the part that recorded the tensor first, for messages.
        allocate: allocates the memory.
    """

    def __init__(
        self, tag: str, shape: tuple[int, ...], side: str, first: str, allocate: Allocate
    ) -> None:
        self.tag = tag
        self.side = side
        self.first = first
        self.values = allocate(shape, np.dtype(CODES[tag][1]))
        self.width = shape[1] if len(shape) > 1 else 1
        self.written: Int64 = np.full(len(self.values), -1, np.int64)
        """Width that was written of each row; -1: the row is missing."""
        self.is_ragged = False
        self._assembled = np.zeros(len(self.values), bool)

    def accepts(self, block: RowBlock) -> bool:
        """Whether a block has the column's dtype and dimensions."""
        return (
            block.dtype == self.tag
            and block.values.shape[2:] == self.values.shape[2:]
            and (block.values.ndim == self.values.ndim)
        )

    def write(self, rows: Int64, block: RowBlock, *, assembled: bool = False) -> bool:
        """Write the rows that are still missing; return whether the others agree, bit by bit.

        Only the tokens that both hold are compared: a wider block adds tokens to a narrower row.
        With `assembled`, the rows were assembled from fragments. Such rows have lengths and no
        padding.
        """
        lengths = block.lengths
        self.is_ragged |= lengths is not None and not assembled
        self._assembled[rows] |= assembled
        lengths = np.full(len(rows), block.width, np.int64) if lengths is None else lengths
        before = self.written[rows]
        common = np.minimum(before, lengths)
        same = not (common > 0).any() or not self._compare(rows, block, common)[0].any()
        chosen = (before < 0) | ((lengths > before) if same else False)
        self._store(rows[chosen], block.values[chosen])
        self.written[rows[chosen]] = lengths[chosen]
        return same

    def differences(self, rows: Int64, block: RowBlock) -> tuple[int, float]:
        """Return how many values of a block differ from the column's, and the largest |d|."""
        differ, ours, theirs = self._compare(rows, block, self.written[rows])
        if not differ.any():
            return 0, 0.0
        a = widened(Tensor(self.tag, ours))[differ].astype(np.float64)
        b = widened(Tensor(block.dtype, theirs))[differ].astype(np.float64)
        with np.errstate(invalid="ignore"):
            largest = np.abs(a - b)
        return int(differ.sum()), float(largest.max())

    def finish(self, mask: Column | None) -> Padding | None:
        """Fill what was not written; return the padding if rows differ in width.

        The padding value is the one at the padded end of the recorded rows, so that the column is
        padded as its parts were. A missing row is NaN, or the padding value of an integer dtype.
        """
        narrow = self.written < self.width
        if not narrow.any():
            return None
        fill = self._fill(mask) if self.values.ndim > 1 else np.zeros(1, self.values.dtype)[0]
        if self.values.ndim > 1:
            outside = ~self._within(np.maximum(self.written, 0), self.values, flat=True)
            self.values[outside] = fill
        absent = self.written < 0
        floating = self.tag in _NAN or self.values.dtype.kind == "f"
        self.values[absent] = _NAN.get(self.tag, math.nan) if floating else fill
        if self.values.ndim == 1 or not (narrow & ~absent).any():
            return None
        shown = widened(Tensor(self.tag, np.array([fill], self.values.dtype)))[0]
        return Padding(self.side, shown.item())

    def _compare(self, rows: Int64, block: RowBlock, widths: Int64) -> tuple[Bools, Array, Array]:
        """Return which values of the first `widths` tokens differ, the column's, the block's."""
        theirs = np.ascontiguousarray(block.values)
        if self.values.ndim == 1:
            ours = self.values[rows]
        else:
            cut = slice(self.width - block.width, None) if self._is_left else slice(block.width)
            ours = np.ascontiguousarray(self.values[rows, cut])
        common = np.minimum(widths, block.width)
        return (bits(ours) != bits(theirs)) & self._within(common, ours), ours, theirs

    def _within(self, counts: Int64, values: Array, *, flat: bool = False) -> Bools:
        """Return which of `values` are among the first (or last) `counts` tokens of their row."""
        if values.ndim == 1:
            return counts > 0
        inside = is_in_row(counts, values.shape[1], self.side)
        return inside if flat else inside.reshape(*inside.shape, *[1] * (values.ndim - 2))

    def _store(self, rows: Int64, values: Array) -> None:
        if self.values.ndim == 1:
            self.values[rows] = values
        elif self._is_left:
            self.values[rows, self.width - values.shape[1] :] = values
        else:
            self.values[rows, : values.shape[1]] = values

    def _fill(self, mask: Column | None) -> np.generic:
        """Return the value at the padded end of recorded rows; for floats only a unique one."""
        zero: np.generic = np.zeros(1, self.values.dtype)[0]
        if mask is None or mask.width != self.width or self.values.ndim != 2 or self.is_ragged:
            return zero
        usable = (self.written > 0) & (mask.written == self.written) & ~self._assembled
        rows = np.flatnonzero(usable)
        end = self.width - self.written[rows] if self._is_left else self.written[rows] - 1
        edge = self.values[rows, end][mask.values[rows, end] == 0]
        found, counts = np.unique(edge, return_counts=True)
        if not len(found) or (self.values.dtype.kind == "f" and len(found) > 1):
            return zero
        fill: np.generic = found[counts.argmax()]
        return fill

    @property
    def _is_left(self) -> bool:
        return self.side == "left"


class Assembly:
    """One tensor of one pass, assembled from fragments; begins as zeros.

    Args:
        tag: dtype tag.
        values: [rows, span, ...] of all samples; is overwritten.
    """

    def __init__(self, tag: str, values: Array) -> None:
        self.tag = tag
        self.values = values
        self.values[...] = 0
        self._state = np.zeros(values.shape[:2], np.uint8)
        self.differing = 0
        """Number of values of tokens that two fragments hold and that differ."""

    def write(self, rows: Int64, tokens: TokenPositions, values: Array) -> None:
        """Write the tokens of a part's rows; counted tokens replace others."""
        uncounted = tokens.present & ~tokens.counted
        for selected, state in ((tokens.counted, _COUNTED), (uncounted, _FILLED)):
            row, token = np.nonzero(selected)
            target, position = rows[row], tokens.positions[row, token]
            state_before = self._state[target, position]
            again = state_before == state
            ours = self.values[target[again], position[again]]
            differ = bits(ours) != bits(np.ascontiguousarray(values[row[again], token[again]]))
            self.differing += int(differ.sum())
            free = state_before < state
            self.values[target[free], position[free]] = values[row[free], token[free]]
            self._state[target[free], position[free]] = state

    def finish(self) -> tuple[Int64, RowBlock, Int64]:
        """Return the rows that were written, their values with lengths, and the rows with holes."""
        present = self._state > 0
        rows = np.flatnonzero(present.any(axis=1))
        ends = np.arange(present.shape[1]) + 1
        lengths = (present * ends).max(axis=1, initial=0)[rows].astype(np.int64)
        holes = rows[present[rows].sum(axis=1) < lengths]
        return rows, RowBlock(self.tag, self.values[rows], lengths), holes


def bits(values: Array) -> Array:
    """Return values as unsigned integers, which are equal where the bits are."""
    return values.view(f"u{values.dtype.itemsize}")

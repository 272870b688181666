"""One step of a dump as one `Batch`: rows of every stage, rank and part side by side.

Rows are known by sample id; where a stage has none, by their place, if an earlier stage has the
same ranks with as many rows. Every entry is read twice, first for what it holds and then for its
values, so that beside the batch no more than one file is in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from stagescope.batch import Batch, BatchPart, Gap, Tensor
from stagescope.flow import order_of
from stagescope.wire.errors import NotFound, StagescopeError
from stagescope_service.dumps.joining.column import Allocate, Array, Column, Piece, piece_of
from stagescope_service.dumps.joining.fragments import PLACES, Assembly, Locations, locations_of
from stagescope_service.dumps.joining.parts import find_parts
from stagescope_service.dumps.joining.rows import FoundPart, Rows
from stagescope_service.dumps.records import Dump, Record

_OF_A_PASS: Final = ("entropy", "values", "loss")
"""Values that every pass over the rows has anew, beside those that flow from `log_probs` on."""


def join(
    dump: Dump,
    step: int | None,
    *,
    names: Collection[str] | None = None,
    stages: Collection[str] | None = None,
    source: Mapping[str, Any] | None = None,
    gaps: Sequence[Gap] = (),
    allocate: Allocate = np.empty,
) -> Batch:
    """Return one step of a dump as a batch.

    Args:
        dump: where it is read from.
        step: which step.
        names: only these tensors (and `response_mask`); default: all but parameters and gradients.
        stages: only these; an entry without one has its section's name.
        source: run, attempt, ... beside what the dump says itself.
        gaps: what is known to be missing already.
        allocate: where the batch's memory comes from.

    Raises:
        NotFound: the dump has nothing of this step, or no such tensor; says what there is.
    """
    found = find_parts(dump, step, stages)
    joined = _Joined(dump, found.parts, found.rows, found.sides, names, allocate)
    joined.read()
    batch = joined.batch(step)
    if names is not None and (unknown := set(names) - joined.seen):
        raise NotFound(
            f"{dump.name} has no tensor {', '.join(sorted(unknown))} of step {step}",
            expected=f"some of {', '.join(sorted(joined.seen))}",
        )
    told = {"step": step, "name": dump.name, "kind": dump.kind, **(source or {})}
    return Batch(
        rows=batch.rows,
        tensors=batch.tensors,
        strings=found.strings(),
        lengths=batch.lengths,
        padding=batch.padding,
        meta=found.meta(dump),
        source={**told, "files": found.files},
        gaps=(*gaps, *found.gaps, *batch.gaps),
        parts=batch.parts,
    )


class _Joined:
    """Columns and parts while they are read."""

    def __init__(
        self,
        dump: Dump,
        parts: Sequence[FoundPart],
        rows: Rows,
        sides: Mapping[str, str],
        names: Collection[str] | None,
        allocate: Allocate,
    ) -> None:
        self.seen: set[str] = set()
        self._dump = dump
        self._parts = parts
        self._rows = rows
        self._sides = sides
        self._names = None if names is None else {*names, "response_mask"}
        self._allocate = allocate
        self._columns: dict[str, Column] = {}
        self._own: list[dict[str, Tensor]] = [{} for _ in parts]
        self._assemblies: dict[tuple[Any, ...], Assembly] = {}
        self._recorded: list[dict[str, int | None]] = [{} for _ in parts]
        self._gaps: list[Gap] = []

    def read(self) -> None:
        """Read every entry's values into the columns."""
        self._make_columns()
        for at, part in enumerate(self._parts):
            for entry in part.entries:
                try:
                    record = self._dump.read(entry)
                except StagescopeError as error:
                    self._gaps.append(Gap("file", f"{part}: {error}"))
                    continue
                self._take(at, part, record)

    def batch(self, step: int | None) -> Batch:
        """Return what was read; its strings and source are not there yet."""
        self._put_assembled()
        mask = self._columns.get("response_mask")
        padding = {}
        # The mask last: where the others end is read off it.
        for name in sorted(self._columns, key=lambda name: name == "response_mask"):
            column = self._columns[name]
            if (found := column.finish(mask)) is not None:
                padding[name] = found
            if absent := np.flatnonzero(column.written < 0).tolist():
                self._gaps.append(Gap("rows", f"{name} is not there for {self._named(absent)}"))
        return Batch(
            rows=len(self._rows),
            tensors={
                name: Tensor(column.tag, column.values)
                for name, column in sorted(self._columns.items(), key=_flow)
            },
            lengths={n: np.maximum(c.written, 0) for n, c in self._columns.items() if c.is_ragged},
            padding=padding,
            gaps=tuple(self._gaps),
            parts=tuple(self._part(at, part) for at, part in enumerate(self._parts)),
        )

    def _make_columns(self) -> None:
        widest: dict[str, tuple[str, tuple[int, ...], str]] = {}
        for part in self._parts:
            for name, (tag, found) in part.shapes.items():
                self.seen.add(name)
                if not self._is_wanted(name) or part.rows is None or not len(part.rows):
                    continue
                shape = found if part.is_once else self._whole_shape(part, name, found)
                if shape is None:
                    continue
                known = widest.setdefault(name, (tag, shape, str(part)))
                if known[0] == tag and len(known[1]) == len(shape) > 1:
                    width = max(known[1][1], shape[1])
                    widest[name] = (tag, (known[1][0], width, *known[1][2:]), known[2])
        for name, (tag, shape, first) in widest.items():
            whole = (len(self._rows), *shape[1:])
            side = self._sides.get(name, "right")
            self._columns[name] = Column(tag, whole, side, first, self._allocate)

    def _whole_shape(
        self, part: FoundPart, name: str, shape: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        """Return the shape of a tensor of pieces of samples, put together; None: it cannot be."""
        mask = part.shapes.get("response_mask")
        if part.span is None or name in PLACES or self._sides.get(name) == "left":
            return None
        if len(shape) == 1:
            return shape
        is_of_tokens = mask is not None and mask[1][:2] == shape[:2]
        return (shape[0], part.span, *shape[2:]) if is_of_tokens else None

    def _take(self, at: int, part: FoundPart, record: Record) -> None:
        tensors = part.unpacked(record)
        spots = None if part.is_once or part.span is None else locations_of(tensors, part.count)
        for name, wire in tensors.items():
            self.seen.add(name)
            if not self._is_wanted(name) or name in self._recorded[at]:
                continue  # a tensor may stand in several sections
            piece = piece_of(wire, part.count, self._sides.get(name, "right"))
            if piece is None or part.rows is None or name not in self._columns:
                self._recorded[at][name] = None
                self._keep(at, name, wire[0], wire[2].reshape(wire[1]))
                continue
            if part.chosen is not None:
                lengths = None if piece.lengths is None else piece.lengths[part.chosen]
                piece = Piece(piece.tag, piece.values[part.chosen], lengths)
            self._recorded[at][name] = piece.width if piece.values.ndim > 1 else None
            if spots is not None:
                self._place(part, name, piece, spots)
            self._put(at, part, name, piece)

    def _put(self, at: int, part: FoundPart, name: str, piece: Piece) -> None:
        column, rows = self._columns[name], part.rows
        assert rows is not None
        fits = column.fits(piece) and part.is_once
        if fits and column.put(rows, piece):
            return
        self._keep(at, name, piece.tag, piece.values)
        if not column.fits(piece):
            what = f"{piece.tag} {list(piece.values.shape[1:])}, that of {column.first} is "
            text = f"{what}{column.tag} {list(column.values.shape[1:])}"
            self._gaps.append(Gap("disagrees", f"{name} of {part} is {text}"))
        elif part.is_once and not _is_of_a_pass(name):
            count, largest = column.differences(rows, piece)
            self._gaps.append(
                Gap(
                    "disagrees",
                    f"{name} of {part} is not that of {column.first}: {count} of "
                    f"{piece.values.size} values differ, max |d| {largest:.3g}",
                )
            )

    def _place(self, part: FoundPart, name: str, piece: Piece, spots: Locations) -> None:
        """Write the tokens of pieces of samples where they lie."""
        column, rows = self._columns[name], part.rows
        assert rows is not None
        if not column.fits(piece) or piece.values.shape[:2] not in (
            spots.positions.shape, spots.positions.shape[:1],
        ):  # fmt: skip
            return
        if piece.values.ndim == 1:
            first = np.unique(rows, return_index=True)[1]
            if not column.put(rows[first], Piece(piece.tag, piece.values[first], None)):
                self._gaps.append(Gap("disagrees", f"{name} of {part} is not that of its others"))
            return
        one = (part.stage, part.role, part.part.occurrence, part.part.epoch, name)
        if one not in self._assemblies:
            self._assemblies[one] = Assembly(
                column.tag, column.values.shape, column.values.dtype, self._allocate
            )
        self._assemblies[one].put(rows, spots, piece.values)

    def _put_assembled(self) -> None:
        """Write samples that were put together from pieces, where no token of them lacks."""
        for (stage, *_, name), assembly in self._assemblies.items():
            column = self._columns[name]
            rows, piece, holes = assembly.finish()
            if len(holes):
                named = self._named(holes.tolist())
                self._gaps.append(
                    Gap("rows", f"the pieces of {name} in {stage} have holes: {named}")
                )
            whole = ~np.isin(rows, holes)
            assert piece.lengths is not None
            found = Piece(piece.tag, piece.values[whole], piece.lengths[whole])
            same = column.put(rows[whole], found, of_pieces=True)
            if assembly.differing or not (same or _is_of_a_pass(name)):
                where = "its other pieces" if assembly.differing else column.first
                self._gaps.append(Gap("disagrees", f"{name} of {stage} is not that of {where}"))

    def _keep(self, at: int, name: str, tag: str, values: Array) -> None:
        own = self._allocate(values.shape, values.dtype)
        own[...] = values
        self._own[at][name] = Tensor(tag, own)

    def _part(self, at: int, part: FoundPart) -> BatchPart:
        recorded = self._recorded[at]
        return BatchPart(
            stage=part.stage,
            role=part.role,
            rank=part.rank,
            part=part.part,
            rows=np.empty(0, np.int64) if part.rows is None else part.rows,
            names=tuple(recorded),
            widths={name: width for name, width in recorded.items() if width is not None},
            own=self._own[at],
            numbers=part.numbers,
        )

    def _is_wanted(self, name: str) -> bool:
        if self._names is not None:
            return name in self._names
        return name.partition("/")[0].partition(".")[0] not in ("parameter", "gradient")

    def _named(self, rows: list[int]) -> str:
        names = ", ".join(self._rows.name(row) for row in rows[:4])
        return f"{len(rows)} of {len(self._rows)} rows ({names}{', ...' if len(rows) > 4 else ''})"


def _is_of_a_pass(name: str) -> bool:
    return name in _OF_A_PASS or order_of(name) >= order_of("log_probs")


def _flow(item: tuple[str, Column]) -> tuple[int, str]:
    return order_of(item[0]), item[0]

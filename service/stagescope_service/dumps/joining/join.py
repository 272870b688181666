"""One step of a dump as one `Batch`: the rows of every stage, rank and part side by side.

Rows are aligned by sample id. Rows of a stage without ids are aligned by position, if an earlier
stage has the same ranks with as many rows. Every entry is read twice, first for its shapes and then
for its values. So at most one file is in memory, besides the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from stagescope_service.dumps.joining.parts import DumpParts, find_parts
from stagescope_service.dumps.joining.rows import Allocate, Assembly, Column, RecordedPart
from stagescope_service.dumps.records import Dump, DumpContents
from stagescope_service.rows.positions import POSITION_TENSORS, TokenPositions, token_positions
from stagescope_service.rows.ragged import Int64, RowBlock, row_block, unpack
from stagescope_wire.batch import Batch, BatchPart, Gap, Tensor
from stagescope_wire.batch.data import flow_index
from stagescope_wire.errors import NotFound, StagescopeError

_RECOMPUTED: Final = ("entropy", "values", "loss")
"""Values that every pass over the rows recomputes, like `log_probs` and the tensors after it."""
_AssemblyKey: TypeAlias = "tuple[str, str | None, int, int, str]"
"""(stage, role, occurrence, epoch, tensor)"""


class Selection(NamedTuple):
    """The tensors and stages that are wanted; None: all."""

    names: Collection[str] | None = None
    """`response_mask` always; None leaves out parameters and gradients."""
    stages: Collection[str] | None = None
    """An entry without a stage has its section's name."""

    def has_stage(self, stage: str | None) -> bool:
        """Return whether a stage is selected."""
        return self.stages is None or stage in self.stages


EVERYTHING: Final = Selection()


def join(
    dump: Dump,
    step: int | None,
    selection: Selection = EVERYTHING,
    *,
    source: Mapping[str, object] | None = None,
    gaps: Sequence[Gap] = (),
    allocate: Allocate = np.empty,
) -> Batch:
    """Return one step of a dump as a batch.

    Args:
        dump: the dump to read.
        step: which step.
        selection: which tensors and stages.
        source: run, attempt, ..., added to `Batch.source`.
        gaps: gaps that are known already.
        allocate: allocates the batch's memory.

    Raises:
        NotFound: the dump has nothing of this step, or no such tensor; lists what there is.
    """
    names = selection.names
    found = find_parts(dump, step, selection.stages)
    joiner = _Joiner(dump, found, names, allocate)
    joiner.read()
    batch = joiner.batch()
    if names is not None and (unknown := set(names) - joiner.seen):
        raise NotFound(
            f"{dump.name} has no tensor {', '.join(sorted(unknown))} of step {step}",
            expected=f"some of {', '.join(sorted(joiner.seen))}",
        )
    described = {"step": step, "name": dump.name, "kind": dump.kind, **(source or {})}
    return dataclasses.replace(
        batch,
        strings=found.strings(),
        meta=found.meta(dump),
        source={**described, "files": found.files},
        gaps=(*gaps, *found.gaps, *batch.gaps),
    )


class _Joiner:
    def __init__(
        self, dump: Dump, found: DumpParts, names: Collection[str] | None, allocate: Allocate
    ) -> None:
        self.seen: set[str] = set()
        self._dump = dump
        self._parts: Sequence[RecordedPart] = found.parts
        self._order = found.by_precedence()
        self._rows = found.rows
        self._sides = found.sides
        self._names = None if names is None else {*names, "response_mask"}
        self._allocate = allocate
        self._columns: dict[str, Column] = {}
        self._own: list[dict[str, Tensor]] = [{} for _ in found.parts]
        self._own_lengths: list[dict[str, Int64]] = [{} for _ in found.parts]
        self._assemblies: dict[_AssemblyKey, Assembly] = {}
        self._recorded: list[dict[str, int | None]] = [{} for _ in found.parts]
        self._gaps: list[Gap] = []

    def read(self) -> None:
        """Read every entry's values into the columns."""
        self._make_columns()
        for index in self._order:
            part = self._parts[index]
            for entry in part.entries:
                try:
                    record = self._dump.read(entry)
                except StagescopeError as error:
                    self._gaps.append(Gap("file", f"{part}: {error}"))
                    continue
                self._add(index, part, record)

    def batch(self) -> Batch:
        """Return what was read; strings and source are still empty."""
        self._write_assembled()
        mask = self._columns.get("response_mask")
        padding = {}
        # The mask last: `finish` of the others reads from it where they end.
        for name in sorted(self._columns, key=lambda name: name == "response_mask"):
            column = self._columns[name]
            if (found := column.finish(mask)) is not None:
                padding[name] = found
            if absent := np.flatnonzero(column.written < 0).tolist():
                self._gaps.append(Gap("rows", f"{name} is missing for {self._list_rows(absent)}"))
        return Batch(
            rows=len(self._rows),
            tensors={
                name: Tensor(self._columns[name].tag, self._columns[name].values)
                for name in sorted(self._columns, key=lambda name: (flow_index(name), name))
            },
            lengths={n: np.maximum(c.written, 0) for n, c in self._columns.items() if c.is_ragged},
            padding=padding,
            gaps=tuple(self._gaps),
            parts=tuple(self._part(index, part) for index, part in enumerate(self._parts)),
        )

    def _make_columns(self) -> None:
        widest: dict[str, tuple[str, tuple[int, ...], str]] = {}
        for part in map(self._parts.__getitem__, self._order):
            for name, (tag, recorded) in part.shapes.items():
                self.seen.add(name)
                if not self._is_requested(name) or part.rows is None or not len(part.rows):
                    continue
                shape = recorded if part.is_whole else self._assembled_shape(part, name, recorded)
                if shape is None:
                    continue
                first = widest.setdefault(name, (tag, shape, str(part)))
                if first[0] == tag and len(first[1]) == len(shape) > 1:
                    width = max(first[1][1], shape[1])
                    widest[name] = (tag, (first[1][0], width, *first[1][2:]), first[2])
        for name, (tag, shape, first_part) in widest.items():
            of_step = (len(self._rows), *shape[1:])
            side = self._sides.get(name, "right")
            self._columns[name] = Column(tag, of_step, side, first_part, self._allocate)

    def _assembled_shape(
        self, part: RecordedPart, name: str, shape: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        mask = part.shapes.get("response_mask")
        if part.span is None or name in POSITION_TENSORS or self._sides.get(name) == "left":
            return None
        if len(shape) == 1:
            return shape
        is_of_tokens = mask is not None and mask[1][:2] == shape[:2]
        return (shape[0], part.span, *shape[2:]) if is_of_tokens else None

    def _add(self, index: int, part: RecordedPart, record: DumpContents) -> None:
        tensors = unpack(record.tensors)
        in_fragments = not part.is_whole and part.span is not None
        tokens = token_positions(tensors, part.count) if in_fragments else None
        for name, wire in tensors.items():
            self.seen.add(name)
            if not self._is_requested(name) or name in self._recorded[index]:
                continue  # a tensor may be in several sections
            block = row_block(wire, part.count, self._sides.get(name, "right"))
            if block is None or part.rows is None or name not in self._columns:
                self._recorded[index][name] = None
                block = row_block(wire, part.count, "right")
                if block is None or block.lengths is None or part.consumed is not None:
                    block = RowBlock(wire[0], wire[2].reshape(wire[1]), None)
                self._keep_own(index, name, block)
                continue
            if part.consumed is not None:
                block = block.take(part.consumed)
            self._recorded[index][name] = block.width if block.values.ndim > 1 else None
            if tokens is not None:
                self._write_fragments(part, name, block, tokens)
            self._write(index, part, name, block)

    def _write(self, index: int, part: RecordedPart, name: str, block: RowBlock) -> None:
        column, rows = self._columns[name], part.rows
        assert rows is not None
        is_accepted = column.accepts(block)
        if is_accepted and part.is_whole and column.write(rows, block):
            return
        added = part.about.get("joined_tensors")
        if isinstance(added, list) and name in added:
            return  # a copy of another part's, with 0 where no token counts
        self._keep_own(index, name, block)
        if not is_accepted:
            text = f"{name} of {part} is {block.dtype} {list(block.values.shape[1:])}"
            first = f"{column.first} has {column.tag} {list(column.values.shape[1:])}"
            self._gaps.append(Gap("disagrees", f"{text}, but {first}"))
        elif part.is_whole and not _is_recomputed(name):
            count, largest = column.differences(rows, block)
            self._gaps.append(
                Gap(
                    "disagrees",
                    f"{name} of {part} differs from {column.first}: {count} of "
                    f"{block.values.size} values differ, max |d| {largest:.3g}",
                )
            )

    def _write_fragments(
        self, part: RecordedPart, name: str, block: RowBlock, tokens: TokenPositions
    ) -> None:
        column, rows = self._columns[name], part.rows
        assert rows is not None
        shapes = (tokens.positions.shape, tokens.positions.shape[:1])
        if not column.accepts(block) or block.values.shape[:2] not in shapes:
            return
        if block.values.ndim == 1:
            first = np.unique(rows, return_index=True)[1]
            if not column.write(rows[first], block.take(first)):
                self._gaps.append(
                    Gap("disagrees", f"{name} of {part} differs from its other pieces")
                )
            return
        key = (part.stage, part.role, part.part.occurrence, part.part.epoch, name)
        if key not in self._assemblies:
            values = self._allocate(column.values.shape, column.values.dtype)
            self._assemblies[key] = Assembly(column.tag, values)
        self._assemblies[key].write(rows, tokens, block.values)

    def _write_assembled(self) -> None:
        for (stage, *_, name), assembly in self._assemblies.items():
            column = self._columns[name]
            rows, block, holes = assembly.finish()
            if len(holes):
                listed = self._list_rows(holes.tolist())
                self._gaps.append(
                    Gap("rows", f"the pieces of {name} in {stage} have holes: {listed}")
                )
            complete = ~np.isin(rows, holes)
            same = column.write(rows[complete], block.take(complete), assembled=True)
            if assembly.differing or not (same or _is_recomputed(name)):
                other = "its other pieces" if assembly.differing else column.first
                self._gaps.append(Gap("disagrees", f"{name} of {stage} differs from {other}"))

    def _keep_own(self, index: int, name: str, block: RowBlock) -> None:
        own = self._allocate(block.values.shape, block.values.dtype)
        own[...] = block.values
        self._own[index][name] = Tensor(block.dtype, own)
        if block.lengths is not None and block.values.ndim > 1:
            self._own_lengths[index][name] = block.lengths

    def _part(self, index: int, part: RecordedPart) -> BatchPart:
        recorded = self._recorded[index]
        return BatchPart(
            stage=part.stage,
            role=part.role,
            rank=part.rank,
            part=part.part,
            rows=np.empty(0, np.int64) if part.rows is None else part.rows,
            names=tuple(recorded),
            widths={name: width for name, width in recorded.items() if width is not None},
            own=self._own[index],
            numbers=part.numbers,
            lengths=self._own_lengths[index],
            about=part.process,
        )

    def _is_requested(self, name: str) -> bool:
        if self._names is not None:
            return name in self._names
        return name.partition("/")[0].partition(".")[0] not in ("parameter", "gradient")

    def _list_rows(self, rows: list[int]) -> str:
        names = ", ".join(self._rows.name(row) for row in rows[:4])
        return f"{len(rows)} of {len(self._rows)} rows ({names}{', ...' if len(rows) > 4 else ''})"


def _is_recomputed(name: str) -> bool:
    return name in _RECOMPUTED or flow_index(name) >= flow_index("log_probs")

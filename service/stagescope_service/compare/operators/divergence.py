"""The first operator in which two dumps differ: two ranks, steps, attempts, runs or devices.

Operators are in the execution order of the first side. If an operator's input is the first row
that differs, its cause was not recorded (an operator that msprobe does not hook, or the data).
Then `first_sections` names the sections of that call that differ. `first_note` says that no call
before it returned such values.

Parameters and gradients of parameters (levels L0 and mix) have their own answers: between
data-parallel replicas on different data every activation differs, but no parameter may.
"""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, TypedDict

import numpy as np
from pydantic import Field

from stagescope_service.compare.operators.calls import Codes, Floats, OperatorColumns, pair_calls
from stagescope_service.compare.operators.differences import (
    VERDICTS,
    RowDifferences,
    Thresholds,
    Verdicts,
    differences,
)
from stagescope_service.fields import Described, Number, Row, one_of
from stagescope_wire.nonfinite import Json

MAX_VERDICTS: Final = 100
"""Most rows, and operators of only one side, that an answer lists; all are counted."""


Name = Annotated[
    str,
    Field(
        description="msprobe's full name of the call.",
        examples=["Module.model.layers.0.mlp.down_proj.Linear.forward.0"],
    ),
]
CallPosition = Annotated[int, Field(description="Position of the call in the dump, from 0.")]
Source = Annotated[
    str | None, Field(description="The first frame of the call's stack outside torch.")
]
NonFinite = Annotated[
    str | None,
    Field(
        description="Which of NaN and infinities it holds: `nan` (alone or beside infinities), "
        "`+inf`, `-inf` or `inf` (both signs); null: none, or not known.",
        examples=["nan"],
    ),
]
Section = Annotated[
    str,
    Field(
        description="What of the call it is.",
        examples=["input_args", "output", "parameters", "grad"],
    ),
]


class SideCall(Row):
    """An operator call of one side."""

    order: CallPosition
    name: Name
    operator: str | None
    """The module's path, or the function's name."""
    module_class: str | None
    """Class of the module; null: it is no module."""
    direction: str | None
    """Direction in the name: `forward`, `backward`, `parameters_grad` or `debug`; null: the name
    has none."""
    source: Source
    stack_id: str | None
    """Id of the call's stack, for `/steps/{step}/operators/stack`; null: none was recorded."""
    parent: str | None
    """The module that called it; null: not known."""


class SideValue(SideCall):
    """An argument or result of one side."""

    shape: list[int] | None
    """Shape of the tensor in elements; null: it is no tensor."""
    type: str | None
    """Type of the value, such as `torch.Tensor`."""
    dtype: str | None
    """Dtype of the tensor; null: it is no tensor."""
    non_finite: NonFinite
    checksum: str | None
    """msprobe's checksum, if it was requested; null: there is none."""
    value: str | None
    """Text of a value that is no tensor; null: it is a tensor."""
    placements: str | None
    """Placements of a DTensor; null: it is no DTensor."""
    min: Number | None
    """Least value of the tensor's elements; null: unknown."""
    max: Number | None
    """Largest value of the tensor's elements; null: unknown."""
    mean: Number | None
    """Mean value of the tensor's elements; null: unknown."""
    norm: Number | None
    """L2 norm of the tensor's elements; null: unknown."""


class DivergentRow(Row):
    """A row that differs."""

    verdict: Annotated[
        str, one_of("missing", "type", "shape", "non_finite", "checksum", "value", "statistics")
    ]
    """Kind of the difference, the first that applies; `missing`: only one side has the row."""
    section: Section | None
    """Section of the call that has the row; null: unknown."""
    index: str | None
    """Which argument or result of the section: position and keys, joined by dots."""
    relative: Number | None
    """Relative difference of min, max, mean and norm, a ratio; null: one side alone has the row."""
    threshold: float
    """The ratio over which `relative` counts as a difference; 0: values must be equal."""
    a: SideValue | None
    """Null: only the other side has it."""
    b: SideValue | None
    """Null: only the other side has it."""


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorDivergence(Described):
    """The first operator in which two dumps differ, and counts of the other differences."""

    same: bool
    """Whether no row differs and both sides have the same operators."""
    first: DivergentRow | None
    """The first row that differs, in the order of side `a`; null: none does."""
    first_sections: list[str]
    """The sections of that call with rows that differ."""
    first_note: str | None
    """Where its input differs already: that no recorded call returned it; null: one may have."""
    first_parameter: DivergentRow | None
    """The first row of parameters that differs; null: none does."""
    first_gradient: DivergentRow | None
    """The first row of parameters' gradients that differs; null: none does."""
    rows: list[DivergentRow]
    """The first rows that differ, in execution order."""
    counts: dict[str, int]
    """Verdict -> number of rows, of all."""
    only_a: list[SideCall]
    """The first operators of side `a` without a partner."""
    only_b: list[SideCall]
    """The first operators of side `b` without a partner."""
    only_a_count: int
    """Number of operator calls of side `a` without a partner."""
    only_b_count: int
    """Number of operator calls of side `b` without a partner."""
    paired: int
    """Number of pairs of calls."""
    moved: int
    """Number of these pairs whose order differs between the sides."""
    compared: int
    """Number of rows that both sides have."""
    parameters_compared: int
    """Number of these rows that are parameters; 0 at level L1, which records none."""
    gradients_compared: int
    """Number of these rows that are gradients of parameters; 0 at level L1, which records none."""
    sharded: int
    """Number of rows left out because each rank holds another shard."""
    not_read: int
    """Number of rows whose values differ in memory that no call read: no difference."""
    zero_gradients: int
    """Number of rows that differ in gradients that are zero except for rounding: no difference."""
    identifiers: int
    """Number of rows that differ in values that identify a process or a call, such as a process
    group, a peer, or whether the call was recomputed: no difference."""
    near_counts: int
    """Number of rows that differ in counts (`histc`, `bincount`) by what rounding moves: no
    difference, but with `exact`."""
    other_checksums: int
    """Number of rows whose statistics agree and whose checksums differ: a difference with `exact`
    alone."""
    exact_alignment: bool
    """False where the two differ so much that calls were paired by counting."""

    def fields(self) -> dict[str, Json]:
        """Return it as a dict."""
        return dataclasses.asdict(self)


def first_divergent(
    a: Path,
    b: Path,
    thresholds: Thresholds | None = None,
    *,
    skip_sharded: bool = False,
    limit: int = MAX_VERDICTS,
) -> OperatorDivergence:
    """Find the first divergent operator of two operator tables.

    Args:
        a, b: operator tables; `a` gives the execution order.
        thresholds: what counts as different; see `Thresholds` and `differences`.
        skip_sharded: leave out shards (DTensor), as two ranks of one step hold different ones.
        limit: number of rows, and of operators of only one side, in the answer.

    Raises:
        NotFound: a table does not exist.
        StoreError: a file is no operator table.
    """
    one, other = OperatorColumns(a), OperatorColumns(b)
    paired = pair_calls(one, other)
    found = differences(one, other, paired, thresholds or Thresholds(), skip_sharded=skip_sharded)
    listing = _Listing(one, other, found)
    differing = np.flatnonzero(found.verdict).tolist()
    sections = [listing.section(at) for at in differing]
    rows = [listing.row(at) for at in differing[:limit]]
    return OperatorDivergence(
        same=not (rows or paired.only_a or paired.only_b),
        first=rows[0] if rows else None,
        first_sections=listing.sections_of_first_call(differing),
        first_note=listing.note(differing[0]) if differing else None,
        first_parameter=listing.first_of("parameters", differing, sections),
        first_gradient=listing.first_of("grad", differing, sections),
        rows=rows,
        counts={
            name: count
            for code, name in enumerate(VERDICTS)
            if code and (count := int((found.verdict == code).sum()))
        },
        only_a=[_call(one, call) for call in paired.only_a[:limit]],
        only_b=[_call(other, call) for call in paired.only_b[:limit]],
        only_a_count=len(paired.only_a),
        only_b_count=len(paired.only_b),
        paired=len(paired.pairs),
        moved=paired.moved,
        compared=int(((found.row_a >= 0) & (found.row_b >= 0)).sum()),
        parameters_compared=listing.compared("parameters"),
        gradients_compared=listing.compared("grad"),
        sharded=found.sharded,
        not_read=found.not_read,
        zero_gradients=found.zero_gradients,
        identifiers=found.identifiers,
        near_counts=found.near_counts,
        other_checksums=found.other_checksums,
        exact_alignment=paired.exact,
    )


class DifferenceCurve(TypedDict):
    """The rows that both sides have, in execution order, as columns; for a figure.

    If there are many, each stretch keeps its largest difference and its first row that differs.
    """

    order: list[int]
    """Index of the call in side `a`."""
    name: list[str]
    section: list[str]
    relative: list[float]
    threshold: list[float]
    verdict: list[str]
    """One of `VERDICTS`; "" is no difference."""
    first: int | None
    """Index in these columns of the first row that differs."""
    compared: int
    """Number of rows that both sides have."""
    differing: int
    paired: int


def difference_curve(
    a: Path, b: Path, thresholds: Thresholds | None = None, *, points: int
) -> DifferenceCurve:
    """Return the relative differences of two operator tables along the order of `a`.

    Args:
        a, b: operator tables.
        thresholds: what counts as different.
        points: number of stretches; each returns some rows.

    Raises:
        NotFound: a table does not exist.
        StoreError: a file is no operator table.
    """
    one, other = OperatorColumns(a), OperatorColumns(b)
    paired = pair_calls(one, other)
    found = differences(one, other, paired, thresholds or Thresholds())
    shared = np.flatnonzero((found.row_a >= 0) & (found.row_b >= 0))
    relative, verdict = found.relative[shared], found.verdict[shared]
    at = _of_stretches(np.nan_to_num(relative), verdict, points)
    rows = [int(row) for row in found.row_a[shared[at]]]
    differing = np.flatnonzero(verdict[at])
    names, sections = (one.texts(column) for column in ("name", "section"))
    return {
        "order": [int(one.call_of_row[row]) for row in rows],
        "name": [names.text(row) or "" for row in rows],
        "section": [sections.text(row) or "" for row in rows],
        "relative": np.nan_to_num(relative[at]).tolist(),
        "threshold": found.threshold[shared[at]].tolist(),
        "verdict": [VERDICTS[code] for code in verdict[at].tolist()],
        "first": int(differing[0]) if len(differing) else None,
        "compared": len(shared),
        "differing": int((verdict > 0).sum()),
        "paired": len(paired.pairs),
    }


def _of_stretches(relative: Floats, verdict: Verdicts, points: int) -> Codes:
    """Return indexes of the largest and of the first differing row of each of the stretches."""
    if len(relative) <= 2 * points:
        return np.arange(len(relative))
    bounds = np.linspace(0, len(relative), points + 1).astype(np.int64)
    largest = [begin + int(relative[begin:end].argmax()) for begin, end in pairwise(bounds)]
    differing = np.flatnonzero(verdict)
    firsts = differing[np.unique(np.searchsorted(bounds, differing, "right"), return_index=True)[1]]
    return np.unique(np.concatenate([largest, firsts]))


@dataclasses.dataclass(frozen=True, slots=True)
class _Listing:
    """Lists rows of `differences` with the contents of both tables; `at`: index of a row there."""

    one: OperatorColumns
    other: OperatorColumns
    found: RowDifferences

    def row(self, at: int) -> DivergentRow:
        """Return the fields of a row."""
        side, row = self._side_with_row(at)
        relative = float(self.found.relative[at])
        return {
            "verdict": VERDICTS[int(self.found.verdict[at])],
            "section": side.texts("section").text(row),
            "index": side.texts("index").text(row),
            "relative": None if np.isnan(relative) else relative,
            "threshold": float(self.found.threshold[at]),
            "a": _argument(self.one, int(self.found.row_a[at])),
            "b": _argument(self.other, int(self.found.row_b[at])),
        }

    def section(self, at: int) -> str:
        """Return the section of a row."""
        side, row = self._side_with_row(at)
        return side.texts("section").text(row) or ""

    def first_of(
        self, section: str, differing: list[int], sections: list[str]
    ) -> DivergentRow | None:
        """Return the first of the differing rows, which are of `sections`, of one section."""
        rows = zip(differing, sections, strict=True)
        first = next((at for at, each in rows if each == section), None)
        return None if first is None else self.row(first)

    def sections_of_first_call(self, differing: list[int]) -> list[str]:
        """Return the sections of the first differing call with rows that differ."""
        sections: dict[str, None] = {}
        first_call = None
        for at in differing:
            side, row = self._side_with_row(at)
            call = (side is self.one, int(side.call_of_row[row]))
            if first_call is None:
                first_call = call
            # A row of only the other side is of the same call, or of the next one that differs.
            if call != first_call and call[0]:
                break
            sections[self.section(at)] = None
        return list(sections)

    def note(self, at: int) -> str | None:
        """Return a note if no recorded call returned an input that is the first differing row.

        Extremes identify a result, since a view has its tensor's extremes. If a result of either
        side has them, even by chance, there is no note.
        """
        sides = ((self.one, int(self.found.row_a[at])), (self.other, int(self.found.row_b[at])))
        verdict = VERDICTS[int(self.found.verdict[at])]
        if min(row for _, row in sides) < 0:
            return None
        if verdict not in ("non_finite", "checksum", "statistics"):
            return None
        first, row = sides[0]
        section, direction = (first.texts(name).text(row) for name in ("section", "direction"))
        if section not in ("input_args", "input_kwargs") or direction != "forward":
            return None
        if any(_may_be_returned(side, row) for side, row in sides):
            return None
        name = first.call_text("name", int(first.call_of_row[row]))
        return (
            f"{section}.{first.texts('index').text(row)} of {name} differs already, and no call "
            "that is recorded before it returned such values: they are data, a weight, or the "
            "result of a function that msprobe does not record (grouped matrix products, say)"
        )

    def compared(self, section: str) -> int:
        """Return the number of rows of a section that both sides have."""
        sections = self.one.texts("section")
        if section not in sections.values:
            return 0
        rows = self.found.row_a[(self.found.row_a >= 0) & (self.found.row_b >= 0)]
        return int((sections.codes[rows] == sections.values.index(section)).sum())

    def _side_with_row(self, at: int) -> tuple[OperatorColumns, int]:
        """Return a side that has a row, and the row's index in its table."""
        row = int(self.found.row_a[at])
        return (self.one, row) if row >= 0 else (self.other, int(self.found.row_b[at]))


def _may_be_returned(side: OperatorColumns, row: int) -> bool:
    """Return whether a call before a row's own returned a tensor of the same extremes."""
    before = int(side.starts[side.call_of_row[row]])
    sections = side.texts("section")
    if "output" not in sections.values:
        return False
    same = sections.codes[:before] == sections.values.index("output")
    for name in ("min", "max"):
        values, is_known = side.numbers(name), side.is_known(name)
        if not is_known[row]:
            return True  # a checksum alone does not identify a view of the tensor
        equal = (values[:before] == values[row]) | (
            np.isnan(values[:before]) & np.isnan(values[row])
        )
        same &= is_known[:before] & equal
    return bool(same.any())


def _argument(side: OperatorColumns, row: int) -> SideValue | None:
    if row < 0:
        return None

    def text(column: str) -> str | None:
        return side.texts(column).text(row)

    def number(column: str) -> float | None:
        return float(side.numbers(column)[row]) if side.is_known(column)[row] else None

    shape = text("shape")
    return {
        **_call(side, int(side.call_of_row[row])),
        "shape": None if shape is None else json.loads(shape),
        "type": text("type"),
        "dtype": text("dtype"),
        "non_finite": text("non_finite"),
        "checksum": text("checksum"),
        "value": text("value"),
        "placements": text("placements"),
        "min": number("min"),
        "max": number("max"),
        "mean": number("mean"),
        "norm": number("norm"),
    }


def _call(side: OperatorColumns, call: int) -> SideCall:
    return {
        "order": call,
        "name": side.call_text("name", call) or "",
        "operator": side.call_text("operator", call),
        "module_class": side.call_text("module_class", call),
        "direction": side.call_text("direction", call),
        "source": side.call_text("source", call),
        "stack_id": side.call_text("stack_id", call),
        "parent": side.call_text("parent", call),
    }

"""The first operator in which two dumps differ: two ranks, steps, attempts, runs or devices.

Operators are in the execution order of the first side. If an operator's input is the first row
that differs, its cause was not recorded (an operator that msprobe does not hook, or the data):
`first_sections` names the sections of that call that differ, and `first_note` says that no call
before it returned such values.

Parameters and gradients of parameters (levels L0 and mix) have answers of their own: between
data-parallel replicas on different data every activation differs, and no parameter may.
"""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Final, TypedDict

import numpy as np

from stagescope.wire.nonfinite import Json
from stagescope_service.compare.operators.calls import Codes, Floats, OperatorColumns, pair_calls
from stagescope_service.compare.operators.differences import (
    VERDICTS,
    RowDifferences,
    Thresholds,
    Verdicts,
    differences,
)

MAX_VERDICTS: Final = 100
"""Most rows, and operators of only one side, that an answer lists; all are counted."""


class CallFields(TypedDict):
    """One call of an operator; unknown is None."""

    order: int
    name: str | None
    operator: str | None
    module_class: str | None
    direction: str | None
    source: str | None
    stack_id: str | None
    parent: str | None


class ArgumentFields(CallFields):
    """One argument or result of a call."""

    shape: list[int] | None
    type: str | None
    dtype: str | None
    non_finite: str | None
    checksum: str | None
    value: str | None
    placements: str | None
    min: float | None
    max: float | None
    mean: float | None
    norm: float | None


class DifferingRow(TypedDict):
    """A row that differs; a side is None where it lacks the row."""

    verdict: str
    section: str | None
    index: str | None
    relative: float | None
    threshold: float
    a: ArgumentFields | None
    b: ArgumentFields | None


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorDivergence:
    """The answer; rows are plain values for JSON (except NaN and infinities).

    Attributes:
        first: the first row that differs, None if none does.
        first_sections: the sections of that call with rows that differ.
        first_note: a sentence if no recorded call made the input that differs first; None if one
            may have.
        first_parameter, first_gradient: the first of `parameters` and of `parameters_grad`.
        rows: the first rows that differ, in execution order.
        counts: verdict -> number of rows.
        only_a, only_b: the first operators without a partner, as {order, name, source}.
        only_a_count, only_b_count: their numbers.
        paired: number of pairs of calls; `moved` of them are in another order.
        compared: number of rows that both sides have.
        parameters_compared, gradients_compared: those of parameters and their gradients; 0 at
            level L1, which records none.
        sharded: number of rows left out because each rank holds another shard.
        not_read: number of rows whose values differ in memory that no call read: no difference.
        zero_gradients: number of rows that differ in gradients that are zero but for rounding: no
            difference.
        identifiers: number of rows that differ in what identifies a process or a call (process
            groups, peers, recomputation): no difference.
        near_counts: number of rows that differ in counts by what rounding moves: no difference.
        other_checksums: number of rows whose statistics agree and whose checksums differ: only
            `exact` makes that a difference.
        exact_alignment: False if the two differ so much that calls were paired by occurrence.
    """

    first: DifferingRow | None
    first_sections: list[str]
    first_note: str | None
    first_parameter: DifferingRow | None
    first_gradient: DifferingRow | None
    rows: list[DifferingRow]
    counts: dict[str, int]
    only_a: list[CallFields]
    only_b: list[CallFields]
    only_a_count: int
    only_b_count: int
    paired: int
    moved: int
    compared: int
    parameters_compared: int
    gradients_compared: int
    sharded: int
    not_read: int
    zero_gradients: int
    identifiers: int
    near_counts: int
    other_checksums: int
    exact_alignment: bool

    @property
    def same(self) -> bool:
        """Whether no row differs and both sides have the same operators."""
        return self.first is None and not self.only_a_count and not self.only_b_count

    def fields(self) -> dict[str, Json]:
        """Return it as a dict."""
        return {"same": self.same, **dataclasses.asdict(self)}


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

    Of many rows the one with the largest difference and the first that differs of each stretch.
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
        points: number of stretches of which rows are returned.

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

    def row(self, at: int) -> DifferingRow:
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
    ) -> DifferingRow | None:
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

        A result is identified by its extremes, since a view has those of its tensor. If a result
        of either side has them, even by chance, there is no note.
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


def _argument(side: OperatorColumns, row: int) -> ArgumentFields | None:
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


def _call(side: OperatorColumns, call: int) -> CallFields:
    return {
        "order": call,
        "name": side.call_text("name", call),
        "operator": side.call_text("operator", call),
        "module_class": side.call_text("module_class", call),
        "direction": side.call_text("direction", call),
        "source": side.call_text("source", call),
        "stack_id": side.call_text("stack_id", call),
        "parent": side.call_text("parent", call),
    }

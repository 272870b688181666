"""The first operator in which two dumps differ: two ranks, steps, attempts, runs or devices.

The first is the first in execution order of the first side. Where an operator's input is the first
row that differs, what made it different was not recorded (an operator that msprobe does not hook,
the data itself): `first_sections` says which sections of that call differ, and `first_note` that
no call before it returned such values.

Parameters and gradients of parameters (levels L0 and mix) have answers of their own: between
data-parallel replicas on different data every activation differs, and no parameter may.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from stagescope_service.compare.operators.calls import OperatorColumns, pair_calls
from stagescope_service.compare.operators.differences import (
    VERDICTS,
    RowDifferences,
    Thresholds,
    differences,
)

MOST_VERDICTS: Final = 100
"""Rows, and operators of one side only, that an answer lists; all are counted."""

_CALL: Final = ("name", "operator", "module_class", "direction", "source", "stack_id", "parent")
_NUMBERS: Final = ("min", "max", "mean", "norm")
_TEXTS: Final = ("type", "dtype", "non_finite", "checksum", "value", "placements")


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorDivergence:
    """The answer; rows are plain values, ready for JSON (but for NaN and infinities).

    Attributes:
        first: the first row that differs, None where none does.
        first_sections: the sections of that call with rows that differ.
        first_note: that no recorded call made the input that differs first, in a sentence; None
            where one may have.
        first_parameter, first_gradient: the first of `parameters` and of `parameters_grad`.
        rows: the first rows that differ, in execution order.
        counts: rows by verdict.
        only_a, only_b: the first operators without a partner, as {order, name, source}.
        only_a_count, only_b_count: how many there are.
        paired: pairs of calls; `moved` of them are in another order.
        compared: rows that both sides have.
        parameters_compared, gradients_compared: of these; 0 at level L1, which records none.
        sharded: rows left out because each rank holds another shard.
        not_read: rows whose values differ in memory that no call read: no difference.
        zero_gradients: rows that differ in gradients that are zero but for rounding: no difference.
        exact_alignment: False where the two differ so much that calls were paired by counting.
    """

    first: dict[str, Any] | None
    first_sections: list[str]
    first_note: str | None
    first_parameter: dict[str, Any] | None
    first_gradient: dict[str, Any] | None
    rows: list[dict[str, Any]]
    counts: dict[str, int]
    only_a: list[dict[str, Any]]
    only_b: list[dict[str, Any]]
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
    exact_alignment: bool

    @property
    def same(self) -> bool:
        """Whether no row differs and both sides have the same operators."""
        return self.first is None and not self.only_a_count and not self.only_b_count

    def fields(self) -> dict[str, Any]:
        """Return it as a dict."""
        return {"same": self.same, **dataclasses.asdict(self)}


def first_divergent(
    a: Path,
    b: Path,
    thresholds: Thresholds | None = None,
    *,
    skip_sharded: bool = False,
    limit: int = MOST_VERDICTS,
) -> OperatorDivergence:
    """Find the first divergent operator of two operator tables.

    Args:
        a, b: operator tables; `a` gives the execution order.
        thresholds: what counts as different; see `Thresholds` and `differences`.
        skip_sharded: leave out shards (DTensor), as two ranks of one step hold different ones.
        limit: rows, and operators of one side, in the answer.

    Raises:
        NotFound: one is not there.
        StoreError: one is no operator table.
    """
    one, other = OperatorColumns(a), OperatorColumns(b)
    paired = pair_calls(one, other)
    found = differences(one, other, paired, thresholds or Thresholds(), skip_sharded=skip_sharded)
    differing = np.flatnonzero(found.verdict)
    sections = np.asarray([_section(one, other, found, row) for row in differing.tolist()])
    rows = [_row(one, other, found, row) for row in differing[:limit].tolist()]
    return OperatorDivergence(
        first=rows[0] if rows else None,
        first_sections=_sections_of_first(one, other, found, differing),
        first_note=_note(one, other, found, int(differing[0])) if len(differing) else None,
        first_parameter=_first_of("parameters", one, other, found, differing, sections),
        first_gradient=_first_of("grad", one, other, found, differing, sections),
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
        parameters_compared=_compared(one, found, "parameters"),
        gradients_compared=_compared(one, found, "grad"),
        sharded=found.sharded,
        not_read=found.not_read,
        zero_gradients=found.zero_gradients,
        exact_alignment=paired.exact,
    )


def _place(
    one: OperatorColumns, other: OperatorColumns, found: RowDifferences, row: int
) -> tuple[OperatorColumns, int]:
    """Return a side that has this row, and its place there."""
    at = int(found.row_a[row])
    return (one, at) if at >= 0 else (other, int(found.row_b[row]))


def _section(one: OperatorColumns, other: OperatorColumns, found: RowDifferences, row: int) -> str:
    side, at = _place(one, other, found, row)
    return side.texts("section").text(at) or ""


def _first_of(
    section: str,
    one: OperatorColumns,
    other: OperatorColumns,
    found: RowDifferences,
    differing: np.ndarray[Any, Any],
    sections: np.ndarray[Any, Any],
) -> dict[str, Any] | None:
    rows = differing[sections == section] if len(differing) else differing
    return _row(one, other, found, int(rows[0])) if len(rows) else None


def _sections_of_first(
    one: OperatorColumns,
    other: OperatorColumns,
    found: RowDifferences,
    differing: np.ndarray[Any, Any],
) -> list[str]:
    sections: dict[str, None] = {}
    call = None
    for row in differing.tolist():
        side, at = _place(one, other, found, row)
        here = (side is one, int(side.call_of_row[at]))
        if call is None:
            call = here
        # A row of the other side alone belongs to the same call, or to the next one that differs.
        if here != call and here[0]:
            break
        sections[_section(one, other, found, row)] = None
    return list(sections)


def _note(
    one: OperatorColumns, other: OperatorColumns, found: RowDifferences, row: int
) -> str | None:
    """Say of an input, the first row that differs, that no recorded call before returned it.

    A result is told by its extremes: a view has those of its tensor. Where one of either side has
    them, be it by chance, nothing is said.
    """
    sides = ((one, int(found.row_a[row])), (other, int(found.row_b[row])))
    verdict = VERDICTS[int(found.verdict[row])]
    if min(at for _, at in sides) < 0 or verdict not in ("non_finite", "checksum", "statistics"):
        return None
    first, at = sides[0]
    section, direction = (first.texts(name).text(at) for name in ("section", "direction"))
    if section not in ("input_args", "input_kwargs") or direction != "forward":
        return None
    if any(_may_be_returned(side, place) for side, place in sides):
        return None
    name = first.call_text("name", int(first.call_of_row[at]))
    return (
        f"{section}.{first.texts('index').text(at)} of {name} differs already, and no call that is "
        "recorded before it returned such values: they are data, a weight, or the result of a "
        "function that msprobe does not record (grouped matrix products, say)"
    )


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
            return True  # a checksum alone does not tell a view of the tensor
        equal = (values[:before] == values[row]) | (
            np.isnan(values[:before]) & np.isnan(values[row])
        )
        same &= is_known[:before] & equal
    return bool(same.any())


def _compared(one: OperatorColumns, found: RowDifferences, section: str) -> int:
    sections = one.texts("section")
    if section not in sections.values:
        return 0
    both = found.row_a[(found.row_a >= 0) & (found.row_b >= 0)]
    return int((sections.codes[both] == sections.values.index(section)).sum())


def _row(
    one: OperatorColumns, other: OperatorColumns, found: RowDifferences, row: int
) -> dict[str, Any]:
    side, at = _place(one, other, found, row)
    relative = float(found.relative[row])
    return {
        "verdict": VERDICTS[int(found.verdict[row])],
        "section": side.texts("section").text(at),
        "index": side.texts("index").text(at),
        "relative": None if np.isnan(relative) else relative,
        "threshold": float(found.threshold[row]),
        "a": _side(one, int(found.row_a[row])),
        "b": _side(other, int(found.row_b[row])),
    }


def _side(side: OperatorColumns, row: int) -> dict[str, Any] | None:
    if row < 0:
        return None
    call = int(side.call_of_row[row])
    said: dict[str, Any] = _call(side, call)
    shape = side.texts("shape").text(row)
    said["shape"] = None if shape is None else json.loads(shape)
    for name in _TEXTS:
        said[name] = side.texts(name).text(row)
    for name in _NUMBERS:
        said[name] = float(side.numbers(name)[row]) if side.is_known(name)[row] else None
    return said


def _call(side: OperatorColumns, call: int) -> dict[str, Any]:
    return {"order": call, **{name: side.call_text(name, call) for name in _CALL}}

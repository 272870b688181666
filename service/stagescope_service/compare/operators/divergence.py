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
from typing import Annotated, Final, TypedDict, cast

import numpy as np
from pydantic import Field

from stagescope_service.compare.operators.calls import Codes, Floats, OperatorColumns, pair_calls
from stagescope_service.compare.operators.differences import (
    VALUE_VERDICTS,
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
        description="The part of the call that the tensor belongs to.",
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
    """Number of rows that differ in values that identify a process or a call: no difference. Such
    values are a process group, a peer, or whether the call was recomputed."""
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
    differing = np.flatnonzero(found.verdict).tolist()
    first_of_section: dict[str | None, int] = {}
    for at in differing:
        first_of_section.setdefault(_section(found, at), at)
    first_parameter, first_gradient = map(first_of_section.get, ("parameters", "grad"))
    rows = [_divergent_row(found, at) for at in differing[:limit]]
    counts = np.bincount(found.verdict, minlength=len(VERDICTS)).tolist()
    shared = _shared_rows(found)
    parameters, gradients = (
        int(one.by_text("section", name.__eq__, False)[found.rows.row_a[shared]].sum())
        for name in ("parameters", "grad")
    )
    return OperatorDivergence(
        same=not (rows or paired.only_a or paired.only_b),
        first=rows[0] if rows else None,
        first_sections=_sections_of_first_call(found, differing),
        first_note=_note(found, differing[0]) if differing else None,
        first_parameter=None if first_parameter is None else _divergent_row(found, first_parameter),
        first_gradient=None if first_gradient is None else _divergent_row(found, first_gradient),
        rows=rows,
        counts={name: n for name, n in zip(VERDICTS, counts, strict=True) if name and n},
        only_a=[_call(one, call) for call in paired.only_a[:limit]],
        only_b=[_call(other, call) for call in paired.only_b[:limit]],
        only_a_count=len(paired.only_a),
        only_b_count=len(paired.only_b),
        paired=len(paired.pairs),
        moved=paired.moved,
        compared=len(shared),
        parameters_compared=parameters,
        gradients_compared=gradients,
        exact_alignment=paired.exact,
        **found.left_out,
    )


class DifferenceCurve(TypedDict):
    """The rows that both sides have, in execution order, as columns; for a figure.

    If there are many, each interval keeps its largest difference and its first row that differs.
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
        points: number of intervals; each returns some rows.

    Raises:
        NotFound: a table does not exist.
        StoreError: a file is no operator table.
    """
    one, other = OperatorColumns(a), OperatorColumns(b)
    paired = pair_calls(one, other)
    found = differences(one, other, paired, thresholds or Thresholds())
    shared = _shared_rows(found)
    relative, verdict = found.relative[shared], found.verdict[shared]
    at = _drawn_rows(np.nan_to_num(relative), verdict, points)
    rows = found.rows.row_a[shared[at]].tolist()
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


def _drawn_rows(relative: Floats, verdict: Verdicts, points: int) -> Codes:
    """Return indexes of the largest and of the first differing row of each interval."""
    if len(relative) <= 2 * points:
        return np.arange(len(relative))
    bounds = np.linspace(0, len(relative), points + 1).astype(np.int64)
    largest = [begin + int(relative[begin:end].argmax()) for begin, end in pairwise(bounds)]
    differing = np.flatnonzero(verdict)
    firsts = differing[np.unique(np.searchsorted(bounds, differing, "right"), return_index=True)[1]]
    return np.unique(np.concatenate([largest, firsts]))


def _shared_rows(found: RowDifferences) -> Codes:
    """Return the indexes of the rows that both sides have."""
    return np.flatnonzero((found.rows.row_a >= 0) & (found.rows.row_b >= 0))


def _side_with_row(found: RowDifferences, at: int) -> tuple[OperatorColumns, int]:
    """Return a side that has a row, and the row's index in its table."""
    rows = found.rows
    row = int(rows.row_a[at])
    return (rows.a, row) if row >= 0 else (rows.b, int(rows.row_b[at]))


def _section(found: RowDifferences, at: int) -> str | None:
    side, row = _side_with_row(found, at)
    return side.texts("section").text(row)


def _divergent_row(found: RowDifferences, at: int) -> DivergentRow:
    side, row = _side_with_row(found, at)
    relative = float(found.relative[at])
    return {
        "verdict": VERDICTS[int(found.verdict[at])],
        "section": side.texts("section").text(row),
        "index": side.texts("index").text(row),
        "relative": None if np.isnan(relative) else relative,
        "threshold": float(found.threshold[at]),
        "a": _value(found.rows.a, int(found.rows.row_a[at])),
        "b": _value(found.rows.b, int(found.rows.row_b[at])),
    }


def _sections_of_first_call(found: RowDifferences, differing: list[int]) -> list[str]:
    """Return the sections of the first differing call with rows that differ."""
    sections: dict[str, None] = {}
    first_call = None
    for at in differing:
        side, row = _side_with_row(found, at)
        call = (side is found.rows.a, int(side.call_of_row[row]))
        first_call = first_call or call
        # A row of only the other side is of the same call, or of the next one that differs.
        if call != first_call and call[0]:
            break
        sections[_section(found, at) or ""] = None
    return list(sections)


def _note(found: RowDifferences, at: int) -> str | None:
    """Return a note if no recorded call returned an input that is the first differing row.

    Extremes identify a result, since a view has its tensor's extremes. If a result of either
    side has them, even by chance, there is no note.
    """
    rows = found.rows
    sides = ((rows.a, int(rows.row_a[at])), (rows.b, int(rows.row_b[at])))
    is_on_both = all(row >= 0 for _, row in sides)
    if not is_on_both or VERDICTS[int(found.verdict[at])] not in VALUE_VERDICTS:
        return None
    side, row = sides[0]
    section, index, direction = (
        side.texts(name).text(row) for name in ("section", "index", "direction")
    )
    if section not in ("input_args", "input_kwargs") or direction != "forward":
        return None
    if any(_may_be_returned(each, its_row) for each, its_row in sides):
        return None
    name = side.call_text("name", int(side.call_of_row[row]))
    return (
        f"{section}.{index} of {name} already differs, and no call recorded before it returned "
        "such values. They are data, a weight, or the result of a function that msprobe does not "
        "record, such as a grouped matrix product."
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
            return True  # a checksum alone does not identify a view of the tensor
        equal = np.isclose(values[:before], values[row], rtol=0.0, atol=0.0, equal_nan=True)
        same &= is_known[:before] & equal
    return bool(same.any())


def _value(side: OperatorColumns, row: int) -> SideValue | None:
    if row < 0:
        return None
    texts = ("type", "dtype", "non_finite", "checksum", "value", "placements")
    fields: dict[str, object] = {name: side.texts(name).text(row) for name in texts}
    for name in ("min", "max", "mean", "norm"):
        fields[name] = float(side.numbers(name)[row]) if side.is_known(name)[row] else None
    shape = side.texts("shape").text(row)
    fields["shape"] = None if shape is None else json.loads(shape)
    return cast("SideValue", {**_call(side, int(side.call_of_row[row])), **fields})


def _call(side: OperatorColumns, call: int) -> SideCall:
    columns = ("operator", "module_class", "direction", "source", "stack_id", "parent")
    texts = {column: side.call_text(column, call) for column in columns}
    return cast("SideCall", {"order": call, "name": side.call_text("name", call) or "", **texts})

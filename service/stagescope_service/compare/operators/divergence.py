"""The first operator in which two dumps differ: two ranks, steps, attempts, runs or devices.

Operators are in the execution order of the first side. If an operator's input is the first row
that differs, its cause was not recorded (an operator that msprobe does not hook, or the data).
Then `first_sections` names the sections of that call that differ. `first_note` says that no call
before it returned such values.

Parameters and gradients of parameters (levels L0 and mix) have their own answers: between
data-parallel replicas on different data every activation differs, but no parameter may.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypedDict, cast

import numpy as np

from stagescope_service.compare.operators.calls import (
    Codes,
    Floats,
    OperatorColumns,
    PairedCalls,
    pair_calls,
)
from stagescope_service.compare.operators.differences import (
    VALUE_VERDICTS,
    VERDICTS,
    RowDifferences,
    Thresholds,
    Verdicts,
    differences,
)
from stagescope_service.compare.operators.divergence_answer import (
    DivergentRow,
    OperatorDivergence,
    SideCall,
    SideValue,
    UnequalParameter,
    UnjoinedTensor,
)
from stagescope_service.compare.operators.faulty_shards import FaultyShard, ShardFinder
from stagescope_service.compare.operators.joined_ranks import JoinedTables, join_ranks
from stagescope_service.compare.operators.layouts import Ranks, ShardRule, ranks_of
from stagescope_service.compare.operators.rank_side import Side

MAX_VERDICTS: Final = 100
"""Most rows, and operators of only one side, that an answer lists; all are counted."""


def first_divergent(
    a: Ranks,
    b: Ranks,
    thresholds: Thresholds | None = None,
    *,
    rules: Sequence[ShardRule] = (),
    skip_sharded: bool = False,
    limit: int = MAX_VERDICTS,
) -> OperatorDivergence:
    """Find the first divergent operator of two sides, each of one rank or of a whole layout.

    Args:
        a, b: operator tables; the first rank of `a` gives the execution order.
        thresholds: what counts as different; see `Thresholds` and `differences`.
        rules: how tensors of several ranks are put together, where the user says it.
        skip_sharded: leave out shards (DTensor), as two ranks of one step hold different ones.
        limit: number of rows, and of operators of only one side, in the answer.

    Raises:
        NotFound: a table does not exist.
        StoreError: a file is no operator table.
        InvalidInput: the ranks of a side form no grid.
    """
    compared = _compare(a, b, thresholds or Thresholds(), rules, skip_sharded=skip_sharded)
    one, other, paired, found = compared.a, compared.b, compared.paired, compared.found
    differing = np.flatnonzero(found.verdict).tolist()
    first_of_section: dict[str | None, int] = {}
    for at in differing:
        first_of_section.setdefault(_section(found, at), at)
    firsts = [first_of_section.get(name) for name in ("parameters", "grad")]
    # Full tensors are read for the rows that are shown first.
    with_values = {*differing[:1], *firsts}
    rows = {
        at: _divergent_row(compared, at, values=at in with_values)
        for at in dict.fromkeys(
            [*differing[:limit], *(each for each in firsts if each is not None)]
        )
    }
    first_parameter, first_gradient = (None if at is None else rows[at] for at in firsts)
    counts = np.bincount(found.verdict, minlength=len(VERDICTS)).tolist()
    shared = _shared_rows(found)
    parameters, gradients = (
        int(one.by_text("section", name.__eq__, False)[found.rows.row_a[shared]].sum())
        for name in ("parameters", "grad")
    )
    joined = compared.joined
    unequal = _unequal_parameters(compared)
    # Ranks of another layout call collectives, and what prepares these, in addition.
    is_same_calls = joined is not None or not (paired.only_a or paired.only_b)
    return OperatorDivergence(
        same=not differing and not unequal and is_same_calls,
        first=rows[differing[0]] if differing else None,
        first_sections=_sections_of_first_call(found, differing),
        first_note=_note(found, differing[0], joined is not None) if differing else None,
        first_parameter=first_parameter,
        first_gradient=first_gradient,
        rows=[rows[at] for at in differing[:limit]],
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
        unjoined=[] if joined is None else _unjoined(joined)[:limit],
        joined={} if joined is None else _ways(joined),
        unequal_parameters=unequal[:limit],
        sums_by_mean=0 if joined is None else joined.sums_by_mean,
        layouts=[None, None] if compared.finder is None else compared.finder.layouts(),
        gradient_scales=[1.0, 1.0] if joined is None else list(joined.scales),
        **found.left_out,
    )


class _Compared(NamedTuple):
    """Two sides, their paired calls and how their rows differ."""

    a: OperatorColumns
    b: OperatorColumns
    paired: PairedCalls
    found: RowDifferences
    joined: JoinedTables | None
    """Of sides with several ranks."""
    finder: ShardFinder | None


def _compare(
    a: Ranks,
    b: Ranks,
    thresholds: Thresholds,
    rules: Sequence[ShardRule] = (),
    *,
    skip_sharded: bool = False,
) -> _Compared:
    """Pair and compare the rows of two sides; tensors of several ranks are put together first."""
    ranks_a, ranks_b = ranks_of(a), ranks_of(b)
    if len(ranks_a) == len(ranks_b) == 1:
        one, other = OperatorColumns(ranks_a[0].path), OperatorColumns(ranks_b[0].path)
        paired = pair_calls(one, other)
        found = differences(one, other, paired, thresholds, skip_sharded=skip_sharded)
        return _Compared(one, other, paired, found, None, None)
    sides = (Side(ranks_a, "a"), Side(ranks_b, "b"))
    joined = join_ranks(*sides, thresholds, rules)
    found = differences(
        joined.a,
        joined.b,
        joined.paired,
        thresholds,
        skip_sharded=skip_sharded,
        not_joined=joined.left_out,
    )
    finder = ShardFinder(sides, joined)
    return _Compared(joined.a, joined.b, joined.paired, found, joined, finder)


def _unjoined(joined: JoinedTables) -> list[UnjoinedTensor]:
    """Return the tensors that could not be put together, each once."""
    rows: dict[tuple[str, str | None, str | None], UnjoinedTensor] = {}
    for table, readings in zip((joined.a, joined.b), joined.readings, strict=True):
        for row, reading in sorted(readings.items()):
            if reading.reason and reading.grid.axes:
                name = table.call_text("name", int(table.call_of_row[row])) or ""
                section, index = (table.texts(each).text(row) for each in ("section", "index"))
                rows.setdefault(
                    (name, section, index),
                    {"name": name, "section": section, "index": index, "reason": reading.reason},
                )
    return list(rows.values())


def _unequal_parameters(compared: _Compared) -> list[UnequalParameter]:
    """Return the parameters whose replicas differ."""
    joined, finder = compared.joined, compared.finder
    if joined is None or finder is None:
        return []
    found: list[UnequalParameter] = []
    for side, (table, rows) in enumerate(
        zip((joined.a, joined.b), joined.unequal_parameters, strict=True)
    ):
        for row in rows:
            section, index = (table.texts(each).text(row) for each in ("section", "index"))
            name = table.call_text("name", int(table.call_of_row[row])) or ""
            shards = finder.replicas(side, row)
            found.append({"name": name, "section": section, "index": index, "shards": shards})
    return found


def _ways(joined: JoinedTables) -> dict[str, int]:
    """Return how tensors were put together -> their number, the most frequent first."""
    ways = Counter(
        reading.text()
        for readings in joined.readings
        for reading in readings.values()
        if reading.grid.axes and not reading.reason
    )
    if joined.sizes:
        ways["a size of the shard"] = joined.sizes
    return dict(ways.most_common())


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
    shards: list[FaultyShard]
    """The ranks in which that row differs, of sides with several."""
    compared: int
    """Number of rows that both sides have."""
    differing: int
    paired: int


def difference_curve(
    a: Ranks, b: Ranks, thresholds: Thresholds | None = None, *, points: int
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
    compared = _compare(a, b, thresholds or Thresholds())
    one, paired, found = compared.a, compared.paired, compared.found
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
        "shards": (
            _shards(compared, int(shared[at[differing[0]]]), values=True) if len(differing) else []
        ),
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


def _divergent_row(compared: _Compared, at: int, *, values: bool) -> DivergentRow:
    found, finder = compared.found, compared.finder
    side, row = _side_with_row(found, at)
    relative, threshold = float(found.relative[at]), float(found.threshold[at])
    row_a, row_b = int(found.rows.row_a[at]), int(found.rows.row_b[at])
    joined_a, joined_b = (
        None if finder is None else finder.text_of(side, row)
        for side, row in ((0, row_a), (1, row_b))
    )
    return {
        "verdict": VERDICTS[int(found.verdict[at])],
        "section": side.texts("section").text(row),
        "index": side.texts("index").text(row),
        "relative": None if np.isnan(relative) else relative,
        "threshold": threshold,
        "a": _value(found.rows.a, row_a, joined_a),
        "b": _value(found.rows.b, row_b, joined_b),
        "shards": _shards(compared, at, values=values),
    }


def _shards(compared: _Compared, at: int, *, values: bool) -> list[FaultyShard]:
    """Return the ranks in which a row differs; see `ShardFinder.find`."""
    rows = compared.found.rows
    row_a, row_b = int(rows.row_a[at]), int(rows.row_b[at])
    if compared.finder is None or row_a < 0 or row_b < 0:
        return []
    threshold = float(compared.found.threshold[at])
    return compared.finder.find(row_a, row_b, threshold, values=values)


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


def _note(found: RowDifferences, at: int, is_joined: bool) -> str | None:
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
    layout = " Ranks in another order than the layout says differ so, too." if is_joined else ""
    return (
        f"{section}.{index} of {name} already differs, and no call recorded before it returned "
        "such values. They are data, a weight, or the result of a function that msprobe does not "
        f"record, such as a grouped matrix product.{layout}"
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


def _value(side: OperatorColumns, row: int, joined: str | None) -> SideValue | None:
    if row < 0:
        return None
    texts = ("type", "dtype", "non_finite", "checksum", "value", "placements")
    fields: dict[str, object] = {name: side.texts(name).text(row) for name in texts}
    fields["joined"] = joined
    for name in ("min", "max", "mean", "norm"):
        fields[name] = float(side.numbers(name)[row]) if side.is_known(name)[row] else None
    shape = side.texts("shape").text(row)
    fields["shape"] = None if shape is None else json.loads(shape)
    return cast("SideValue", {**_call(side, int(side.call_of_row[row])), **fields})


def _call(side: OperatorColumns, call: int) -> SideCall:
    columns = ("operator", "module_class", "direction", "source", "stack_id", "parent")
    texts = {column: side.call_text(column, call) for column in columns}
    return cast("SideCall", {"order": call, "name": side.call_text("name", call) or "", **texts})

"""Counts that differ only by rounding: tokens per expert, elements per bin.

A count depends on decisions. Rounding may move a value across the edge of a bin, or change which
expert wins a near tie. Then one count rises by one and another falls by one: 31 tokens against 30
are no divergence, and 31 against 3 are one. A relative difference of t (the threshold of the
coarsest dtype up to there) moves about t x n of n elements across an edge. Counts are near if they
and their total differ by at most 1 + t x n. Their norm may differ by that for each count.

Values made from near counts alone are also near. Copies, casts and views have the same extremes. A
call (`cumsum`, a division by the sum) must read nothing else, and differ by no larger share.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_service.compare.operators.calls import (
    Codes,
    Flags,
    Floats,
    OperatorColumns,
    PairedCalls,
    shared_codes,
)


class JoinedRows(NamedTuple):
    """Rows of paired calls: row of each table (-1 if it has none), and index of the pair."""

    a: OperatorColumns
    b: OperatorColumns
    row_a: Codes
    row_b: Codes
    pair: Codes

    def select(self, flags: Flags) -> JoinedRows:
        """Return the rows for which a flag is true."""
        return JoinedRows(self.a, self.b, *(each[flags] for each in self[2:]))

    def texts(self, column: str, at: int) -> tuple[str | None, str | None]:
        """Return the texts of one row that both sides have."""
        one, other = self.a.texts(column), self.b.texts(column)
        return one.text(int(self.row_a[at])), other.text(int(self.row_b[at]))

    def numbers(self, column: str) -> tuple[Floats, Floats]:
        """Return min, max, mean or norm of each row, of both sides."""
        return self.a.numbers(column)[self.row_a], self.b.numbers(column)[self.row_b]

    def by_text(
        self, column: str, value_of: Callable[[str], object], otherwise: object
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return `OperatorColumns.by_text` of each row, of both sides."""
        one, other = (side.by_text(column, value_of, otherwise) for side in (self.a, self.b))
        return one[self.row_a], other[self.row_b]

    def are_tensors(self) -> tuple[Flags, Flags]:
        """Return which rows are tensors, of both sides."""
        return self.by_text("dtype", lambda _: True, False)

    def texts_differ(self, column: str) -> Flags:
        """Return where a text differs between the sides."""
        codes_a, codes_b = shared_codes(self.a.texts(column), self.b.texts(column))
        differ: Flags = codes_a[self.row_a] != codes_b[self.row_b]
        return differ


def join_rows(a: OperatorColumns, b: OperatorColumns, paired: PairedCalls) -> JoinedRows:
    """Outer join of the rows of paired calls on (section, index), in the order of the pairs."""
    key_a, key_b = _row_keys(a, b)
    pair_of_a, pair_of_b = np.full(a.calls, -1, np.int64), np.full(b.calls, -1, np.int64)
    for number, (i, j) in enumerate(paired.pairs):
        pair_of_a[i] = pair_of_b[j] = number
    of_a, of_b = pair_of_a[a.call_of_row], pair_of_b[b.call_of_row]
    width = max(key_a.max(initial=0), key_b.max(initial=0)) + 1
    rows_a, rows_b = np.flatnonzero(of_a >= 0), np.flatnonzero(of_b >= 0)
    joined_a, joined_b = of_a[rows_a] * width + key_a[rows_a], of_b[rows_b] * width + key_b[rows_b]
    _, in_a, in_b = np.intersect1d(joined_a, joined_b, return_indices=True)
    partner = np.full(len(rows_a), -1, np.int64)
    partner[in_a] = rows_b[in_b]
    only_b = np.setdiff1d(rows_b, partner)
    row_a = np.concatenate([rows_a, np.full(len(only_b), -1, np.int64)])
    row_b = np.concatenate([partner, only_b])
    pair = np.concatenate([of_a[rows_a], of_b[only_b]])
    order = np.argsort(pair, kind="stable")
    return JoinedRows(a, b, row_a[order], row_b[order], pair[order])


def _row_keys(a: OperatorColumns, b: OperatorColumns) -> tuple[Codes, Codes]:
    """Return a code for the section and index of each row, in one numbering of both tables."""
    section_a, section_b = shared_codes(a.texts("section"), b.texts("section"))
    index_a, index_b = shared_codes(a.texts("index"), b.texts("index"))
    width = max(index_a.max(initial=0), index_b.max(initial=0)) + 2
    return (section_a + 1) * width + index_a + 1, (section_b + 1) * width + index_b + 1


def tensor_size(side: OperatorColumns, row: int) -> tuple[int, int] | None:
    """Return the number of dimensions and of elements of a tensor."""
    text = side.texts("shape").text(row)
    if text is None:
        return None
    shape = json.loads(text)
    return len(shape), math.prod(shape)


_COUNTS: Final = re.compile(
    r"histc\Z|bincount|histogram\Z|count_nonzero|tokens_per_expert|expert_tokens"
)
"""Operators whose results are counts."""
_NO_COUNTS: Final = re.compile(
    r"arg(?:max|min|sort|where|partition)|top_?k|sort|search|bucketize|digitize|nonzero|where"
    r"|multinomial|rand|sampl|arange|range|linspace|tri[ul]|one_hot|permut|embed|tensor\Z|full|fill"
    r"|gather|select|take|getitem|setitem|narrow|chunk|split|unbind|slice|view|shape|roll|flip"
    r"|repeat|scatter\Z|index_(?:put|copy)|copy|broadcast|recv|position|label|token_?id|input_?id",
    re.IGNORECASE,
)
"""Operators whose integers are indexes, drawn, or copied from data."""
_COUNT_ARGUMENTS: Final = re.compile(
    r"group_list|tokens_per|expert_tokens|num_\w*tokens|counts?\Z|split_sizes|splits\Z"
)
_SIZES: Final = re.compile(r"split|all_?to_?all|sections|sizes|counts|tokens_per|group_list")
"""Operators and arguments whose lists of integers are sizes of parts."""
_INTEGER: Final = re.compile(r"u?int")
_INPUTS: Final = ("input_args", "input_kwargs")


class _Extremes(NamedTuple):
    """The least and the largest value of a tensor on both sides."""

    min_a: float
    max_a: float
    min_b: float
    max_b: float

    @property
    def largest(self) -> float:
        return max(map(abs, self))

    @property
    def distance(self) -> float:
        return max(abs(self.min_a - self.min_b), abs(self.max_a - self.max_b))

    def limit(self, threshold: float) -> float:
        """Return how far counts of this size may differ."""
        return 1.0 + threshold * self.largest


def near_counts(rows: JoinedRows, differing: Flags, threshold: Floats) -> Flags:
    """Return which rows differ in counts by no more than rounding moves.

    Args:
        rows: rows of paired calls, in execution order.
        differing: rows whose statistics differ.
        threshold: threshold of the coarsest dtype up to each row.
    """
    found = np.zeros(len(rows.pair), bool)
    at_differing = np.flatnonzero(differing).tolist()
    if not at_differing or not _may_have_counts(rows, differing):
        return found
    calls: defaultdict[int, list[int]] = defaultdict(list)
    for at in at_differing:
        calls[int(rows.pair[at])].append(at)
    shares: dict[_Extremes, float] = {}
    """Near counts -> their largest allowed difference, as a share."""
    for pair, members in calls.items():
        share = _share_of_inputs(rows, pair, members, shares)
        for at in members:
            extremes = _extremes(rows, at)
            if extremes in shares:
                found[at] = True
                continue
            rounded = float(threshold[at])
            counts = _is_count(rows, at) and _are_near(rows, at, extremes, rounded)
            is_within = share > 0.0 and extremes.distance <= share * extremes.largest
            if counts or (is_within and rows.texts("section", at)[0] not in _INPUTS):
                found[at] = True
                shares[extremes] = extremes.limit(rounded) / extremes.largest if counts else share
    return found


def near_sizes(rows: JoinedRows, differing: Flags, threshold: Floats) -> Flags:
    """Return which rows are sizes in a list that differ by no more than rounding moves.

    Args:
        rows: rows of paired calls, in execution order.
        differing: rows whose values differ and are no tensors.
        threshold: threshold of the coarsest dtype up to each row.
    """
    found = np.zeros(len(rows.pair), bool)
    for at in np.flatnonzero(differing).tolist():
        name, *rest = (rows.texts("index", at)[0] or "").split(".")
        operator = rows.texts("operator", at)[0] or ""
        is_size = rest and _SIZES.search(f"{operator} {name}")
        if not is_size or set(rows.texts("type", at)) != {"int"}:
            continue
        one, other = (float(text or "nan") for text in rows.texts("value", at))
        found[at] = abs(one - other) <= 1.0 + float(threshold[at]) * max(abs(one), abs(other))
    return found


def _may_have_counts(rows: JoinedRows, differing: Flags) -> bool:
    integer_a, integer_b = rows.by_text("dtype", _is_integer, False)
    return bool((integer_a & integer_b & differing).any()) or all(
        any(map(_COUNTS.search, side.texts("operator").values)) for side in (rows.a, rows.b)
    )


def _is_integer(dtype: str | None) -> bool:
    return _INTEGER.match((dtype or "").lower()) is not None


def _is_count(rows: JoinedRows, at: int) -> bool:
    """Return whether a row is a result that counts, or an argument named for it."""
    is_integer = all(map(_is_integer, rows.texts("dtype", at)))
    section = rows.texts("section", at)[0]
    if section == "input_kwargs":
        name = (rows.texts("index", at)[0] or "").partition(".")[0]
        return is_integer and _COUNT_ARGUMENTS.search(name) is not None
    if section != "output" or rows.texts("direction", at)[0] == "debug":
        return False
    names = (rows.texts(column, at)[0] or "" for column in ("operator", "module_class"))
    operator = " ".join(name.strip("_") for name in names).strip()
    if _COUNTS.search(operator):
        return all(map(float.is_integer, _extremes(rows, at)))
    reads_tensors = _reads_tensors(rows.a, int(rows.row_a[at]))
    return is_integer and not _NO_COUNTS.search(operator) and reads_tensors


def _reads_tensors(side: OperatorColumns, row: int) -> bool:
    """Return whether the call of a row has a tensor among its inputs: else it is data."""
    sections = side.texts("section")
    return any(
        sections.text(other) in _INPUTS and tensor_size(side, other) is not None
        for other in side.rows_of(int(side.call_of_row[row]))
    )


def _are_near(rows: JoinedRows, at: int, extremes: _Extremes, threshold: float) -> bool:
    """Return whether every number of two counts differs by no more than rounding moves."""
    sides = ((rows.a, int(rows.row_a[at])), (rows.b, int(rows.row_b[at])))
    limit = extremes.limit(threshold)
    if extremes.distance > limit:
        return False
    size = tensor_size(*sides[0])
    if size is None or not all(side.is_known("norm")[row] for side, row in sides):
        return True  # of integers msprobe records the extremes alone
    one, other = (float(side.numbers("mean")[row]) * size[1] for side, row in sides)
    norm_a, norm_b = (float(side.numbers("norm")[row]) for side, row in sides)
    is_total_near = abs(one - other) <= 1.0 + threshold * max(one, other)
    return is_total_near and abs(norm_a - norm_b) <= limit * math.sqrt(size[1])


def _share_of_inputs(
    rows: JoinedRows, pair: int, members: list[int], shares: dict[_Extremes, float]
) -> float:
    """Return the share that results of a call may differ by if its inputs are counts, else 0."""
    if not shares:
        return 0.0
    inputs = [at for at in members if rows.texts("section", at)[0] in _INPUTS]
    found = [shares.get(_extremes(rows, at), 0.0) for at in inputs]
    if not found or min(found) == 0.0:
        return 0.0
    call = int(rows.a.call_of_row[rows.row_a[inputs[0]]])
    sizes = (tensor_size(rows.a, row) for row in rows.a.rows_of(call))
    # A tensor of several dimensions is hidden states or a weight.
    return 0.0 if any(size is not None and size[0] > 1 for size in sizes) else max(found)


def _extremes(rows: JoinedRows, at: int) -> _Extremes:
    sides = ((rows.a, rows.row_a[at]), (rows.b, rows.row_b[at]))
    return _Extremes(
        *(float(side.numbers(name)[row]) for side, row in sides for name in ("min", "max"))
    )

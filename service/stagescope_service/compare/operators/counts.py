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
from typing import Final, NamedTuple

import numpy as np

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
        return self._replace(
            row_a=self.row_a[flags], row_b=self.row_b[flags], pair=self.pair[flags]
        )

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
    sort = np.argsort(joined_b, kind="stable")
    position = np.searchsorted(joined_b[sort], joined_a)
    position[position == len(sort)] = 0
    partner = np.full(len(rows_a), -1, np.int64)
    if len(sort):
        is_match = joined_b[sort][position] == joined_a
        partner[is_match] = rows_b[sort[position[is_match]]]
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


def is_tensor(side: OperatorColumns) -> Flags:
    """Return for each row whether it is a tensor; False for row -1."""
    return np.append(side.texts("dtype").codes >= 0, False)


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
            if counts or (_section(rows, at) not in _INPUTS and _within(extremes, share)):
                found[at] = True
                largest = max(map(abs, extremes))
                shares[extremes] = _limit(extremes, rounded) / largest if counts else share
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
        row_a, row_b = int(rows.row_a[at]), int(rows.row_b[at])
        name, *rest = (rows.a.texts("index").text(row_a) or "").split(".")
        operator = rows.a.texts("operator").text(row_a) or ""
        types = {rows.a.texts("type").text(row_a), rows.b.texts("type").text(row_b)}
        if not rest or types != {"int"} or not _SIZES.search(f"{operator} {name}"):
            continue
        one, other = (
            float(side.texts("value").text(row) or "nan")
            for side, row in ((rows.a, row_a), (rows.b, row_b))
        )
        found[at] = abs(one - other) <= 1.0 + float(threshold[at]) * max(abs(one), abs(other))
    return found


def _may_have_counts(rows: JoinedRows, differing: Flags) -> bool:
    whole = _is_integer(rows.a)[rows.row_a] & _is_integer(rows.b)[rows.row_b]
    return bool((whole & differing).any()) or all(
        any(map(_COUNTS.search, side.texts("operator").values)) for side in (rows.a, rows.b)
    )


def _is_integer(side: OperatorColumns) -> Flags:
    """Return for each row whether it is a tensor of integers; False for row -1."""
    dtypes = side.texts("dtype")
    whole = [_INTEGER.match(dtype.lower()) is not None for dtype in dtypes.values]
    return np.append(np.asarray([*whole, False])[dtypes.codes], False)


def _is_count(rows: JoinedRows, at: int) -> bool:
    """Return whether a row is a result that counts, or an argument named for it."""
    row_a, row_b = int(rows.row_a[at]), int(rows.row_b[at])
    dtypes = (side.texts("dtype").text(row) for side, row in ((rows.a, row_a), (rows.b, row_b)))
    is_integer = all(_INTEGER.match((dtype or "").lower()) for dtype in dtypes)
    if _section(rows, at) == "input_kwargs":
        name = (rows.a.texts("index").text(row_a) or "").partition(".")[0]
        return is_integer and _COUNT_ARGUMENTS.search(name) is not None
    if _section(rows, at) != "output" or rows.a.texts("direction").text(row_a) == "debug":
        return False
    names = (rows.a.texts(name).text(row_a) or "" for name in ("operator", "module_class"))
    operator = " ".join(name.strip("_") for name in names).strip()
    if _COUNTS.search(operator):
        return all(math.isfinite(value) and value == round(value) for value in _extremes(rows, at))
    return is_integer and not _NO_COUNTS.search(operator) and _reads_tensors(rows.a, row_a)


def _reads_tensors(side: OperatorColumns, row: int) -> bool:
    """Return whether the call of a row has a tensor among its inputs: else it is data."""
    sections = side.texts("section")
    return any(
        sections.text(other) in _INPUTS and tensor_size(side, other) is not None
        for other in side.rows_of(int(side.call_of_row[row]))
    )


def _are_near(rows: JoinedRows, at: int, extremes: _Extremes, threshold: float) -> bool:
    """Return whether every number of two counts differs by no more than rounding moves."""
    row_a, row_b = int(rows.row_a[at]), int(rows.row_b[at])
    limit = _limit(extremes, threshold)
    low = abs(extremes.min_a - extremes.min_b)
    high = abs(extremes.max_a - extremes.max_b)
    if max(low, high) > limit:
        return False
    size = tensor_size(rows.a, row_a)
    if size is None or not (rows.a.is_known("norm")[row_a] and rows.b.is_known("norm")[row_b]):
        return True  # of integers msprobe records the extremes alone
    totals = [
        float(side.numbers("mean")[row]) * size[1]
        for side, row in ((rows.a, row_a), (rows.b, row_b))
    ]
    norms = [float(side.numbers("norm")[row]) for side, row in ((rows.a, row_a), (rows.b, row_b))]
    return abs(totals[0] - totals[1]) <= 1.0 + threshold * max(totals) and abs(
        norms[0] - norms[1]
    ) <= limit * math.sqrt(size[1])


def _limit(extremes: _Extremes, threshold: float) -> float:
    return 1.0 + threshold * max(map(abs, extremes))


def _share_of_inputs(
    rows: JoinedRows, pair: int, members: list[int], shares: dict[_Extremes, float]
) -> float:
    """Return the share that results of a call may differ by if its inputs are counts, else 0."""
    if not shares:
        return 0.0
    inputs = [at for at in members if _section(rows, at) in _INPUTS]
    found = [shares.get(_extremes(rows, at), 0.0) for at in inputs]
    if not found or min(found) == 0.0:
        return 0.0
    call = int(rows.a.call_of_row[rows.row_a[inputs[0]]])
    for row in rows.a.rows_of(call):
        size = tensor_size(rows.a, row)
        if size is not None and size[0] > 1:  # hidden states, a weight
            return 0.0
    return max(found)


def _within(extremes: _Extremes, share: float) -> bool:
    largest = max(map(abs, extremes))
    distance = max(abs(extremes.min_a - extremes.min_b), abs(extremes.max_a - extremes.max_b))
    return share > 0.0 and distance <= share * largest


def _section(rows: JoinedRows, at: int) -> str | None:
    return rows.a.texts("section").text(int(rows.row_a[at]))


def _extremes(rows: JoinedRows, at: int) -> _Extremes:
    row_a, row_b = int(rows.row_a[at]), int(rows.row_b[at])
    low, high = (rows.a.numbers(name)[row_a] for name in ("min", "max"))
    low_b, high_b = (rows.b.numbers(name)[row_b] for name in ("min", "max"))
    return _Extremes(float(low), float(high), float(low_b), float(high_b))

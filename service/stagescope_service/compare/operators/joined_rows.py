"""The rows of paired calls of two operator tables, joined by section and index."""

from __future__ import annotations

import json
import math
from typing import NamedTuple

import numpy as np

from stagescope_service.compare.operators.calls import (
    Flags,
    OperatorColumns,
    PairedCalls,
    shared_codes,
)
from stagescope_service.compare.operators.sequences import Codes


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

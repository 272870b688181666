"""Pair the calls of two operator tables, whose counters may differ.

A counter does not identify a call: after one extra `linear` on one side, every later one has
another number. Calls pair in order, at two levels:

1. by direction, module path or API, enclosing module, file and function of the source (without the
   line, since code moves) and the shapes of its tensors;
2. in the gaps that this leaves, by direction and module path or API alone: sizes and sources may
   differ.

Before that, calls at the beginning and at the end pair if they are equal in every number. So an
extra call among similar ones does not pair with its neighbour. At last, a module that is called at
another position of the order pairs by its full name.

The parts of a path that wrappers add (FSDP, checkpointing, torch.compile) do not count.

The alignment is a longest common subsequence, by Myers' greedy algorithm ("An O(ND) Difference
Algorithm and Its Variations", Algorithmica 1986). It is linear if two sequences differ little,
whatever repeats. The common beginning and end are removed first, then every element that the other
side lacks. If the rest would still cost too much, elements pair by order of occurrence, and the
result is marked.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from stagescope_service.compare.operators.evidence import infrastructure_stacks, use_of
from stagescope_service.dumps.msprobe.operator_query import CodedText, load_columns, read_stacks

Codes = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Pairs = list[tuple[int, int]]

MAX_STEPS: Final = 3_000_000
"""Most comparisons of one alignment: a few seconds."""
MAX_EDITS: Final = 1_000


class SequenceAlignment(NamedTuple):
    """Pairs of positions, ascending on both sides if `ordered`."""

    pairs: Pairs
    ordered: bool


def common_ends(a: Codes, b: Codes) -> tuple[int, int]:
    """Return the lengths of the common beginning and, after it, of the common end."""
    most = min(len(a), len(b))
    differing = np.flatnonzero(a[:most] != b[:most])
    first = int(differing[0]) if len(differing) else most
    left = most - first
    differing = np.flatnonzero(a[len(a) - left :][::-1] != b[len(b) - left :][::-1])
    return first, int(differing[0]) if len(differing) else left


def align(a: Codes, b: Codes, *, most_steps: int = MAX_STEPS) -> SequenceAlignment:
    """Pair equal elements of two sequences so that as many as possible stay in order."""
    first, last = common_ends(a, b)
    pairs = [(index, index) for index in range(first)]
    at_a, at_b = np.arange(first, len(a) - last), np.arange(first, len(b) - last)
    at_a, at_b = at_a[np.isin(a[at_a], b[at_b])], at_b[np.isin(b[at_b], a[at_a])]
    middle_a, middle_b = a[at_a].tolist(), b[at_b].tolist()
    in_order = _greedy(middle_a, middle_b, most_steps)
    middle = _by_occurrence(middle_a, middle_b) if in_order is None else in_order
    pairs += [(int(at_a[i]), int(at_b[j])) for i, j in middle]
    pairs += [(len(a) - index, len(b) - index) for index in range(last, 0, -1)]
    return SequenceAlignment(pairs, in_order is not None)


def _greedy(a: list[int], b: list[int], most_steps: int) -> Pairs | None:
    """Run Myers' algorithm; return None if it takes over `most_steps` or `MAX_EDITS`."""
    rows, columns = len(a), len(b)
    reach = {1: 0}
    trace: list[dict[int, int]] = []
    steps = 0
    for edits in range(min(rows + columns, MAX_EDITS) + 1):
        # Keep only the diagonals that this round reads.
        trace.append({k: reach[k] for k in range(-edits - 1, edits + 2, 2) if k in reach})
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reach[k - 1] < reach[k + 1])
            x = reach[k + 1] if down else reach[k - 1] + 1
            began = x
            while x < rows and x - k < columns and a[x] == b[x - k]:
                x += 1
            reach[k] = x
            steps += x - began + 1
            if x >= rows and x - k >= columns:
                return _walk_back(trace, rows, columns)
        if steps > most_steps:
            return None
    return None


def _walk_back(trace: list[dict[int, int]], x: int, y: int) -> Pairs:
    pairs: Pairs = []
    for edits in range(len(trace) - 1, -1, -1):
        reach, k = trace[edits], x - y
        down = k == -edits or (k != edits and reach[k - 1] < reach[k + 1])
        before_k = k + 1 if down else k - 1
        before_x = reach[before_k]
        before_y = before_x - before_k
        while x > max(before_x, 0) and y > max(before_y, 0):
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = before_x, before_y
    pairs.reverse()
    return pairs


def _by_occurrence(a: list[int], b: list[int]) -> Pairs:
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    for index in range(len(b) - 1, -1, -1):
        waiting[b[index]].append(index)
    return [(index, waiting[code].pop()) for index, code in enumerate(a) if waiting[code]]


_WRAPPERS: Final = re.compile(
    r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\."
)
_COUNTER: Final = re.compile(r"\.\d+(?=\Z|\.(?:forward|backward|debug)\Z)")
_SOURCE: Final = re.compile(r"(?:.*/)?(?P<file>[^/]*):\d+ in (?P<function>.*)\Z")

_USE_COLUMNS: Final = ("kind", "operator", "direction", "section", "index")
_COLUMNS: Final = (
    "order", "name", "kind", "operator", "module_class", "direction", "source", "stack_id",
    "parent", "section", "index", "type", "dtype", "shape", "min", "max", "mean", "norm",
    "non_finite", "checksum", "value", "placements",
)  # fmt: skip


class OperatorColumns:
    """The columns of an operator table in memory, a row an argument; a call has several rows."""

    def __init__(self, path: Path) -> None:
        self._columns: dict[str, Any] = load_columns(path, _COLUMNS)
        # A call has at least one row, and its rows are adjacent.
        is_first = np.diff(self._columns["order"], prepend=-1) != 0
        self.rows = len(is_first)
        self.starts: Codes = np.flatnonzero(is_first).astype(np.int64)
        self.call_of_row: Codes = np.cumsum(is_first) - 1
        self.calls = len(self.starts)
        self._infrastructure_stacks = infrastructure_stacks(read_stacks(path))

    def texts(self, column: str) -> CodedText:
        """Return a column of texts."""
        return cast("CodedText", self._columns[column])

    def numbers(self, column: str) -> Floats:
        """Return min, max, mean or norm of each row; unknown is NaN (see `is_known`)."""
        return cast("Floats", self._columns[column])

    def is_known(self, column: str) -> Flags:
        """Return which rows have a number in a column, which may be NaN."""
        return cast("Flags", self._columns[f"{column}_known"])

    def replaced(
        self,
        texts: Mapping[str, Mapping[int, str | None]],
        numbers: Mapping[str, Floats],
        known: Mapping[str, Flags],
    ) -> OperatorColumns:
        """Return a copy with other values.

        Args:
            texts: column -> row -> its text.
            numbers, known: min, max, mean or norm -> the whole column, and which rows are known.
        """
        found = copy.copy(self)
        found._columns = {**self._columns, **numbers}
        found._columns |= {f"{name}_known": flags for name, flags in known.items()}
        for column, changes in texts.items():
            codes, values = self.texts(column).codes.copy(), [*self.texts(column).values]
            numbered = {value: code for code, value in enumerate(values)}
            for row, text in changes.items():
                codes[row] = -1 if text is None else numbered.setdefault(text, len(numbered))
            found._columns[column] = CodedText(codes, [*numbered])
        return found

    def by_text(
        self, column: str, value_of: Callable[[str], object], otherwise: object
    ) -> npt.NDArray[Any]:
        """Return a value for the text of each row, and last for row -1, which a side lacks.

        Args:
            column: a column of texts.
            value_of: returns the value of a text.
            otherwise: the value of an unknown text.
        """
        texts = self.texts(column)
        values: npt.NDArray[Any] = np.asarray([*map(value_of, texts.values), otherwise])
        found: npt.NDArray[Any] = values[np.append(texts.codes, -1)]
        return found

    def call_text(self, column: str, call: int) -> str | None:
        """Return the text of a call in a column."""
        return self.texts(column).text(int(self.starts[call]))

    def rows_of(self, call: int) -> range:
        """Return the rows of a call."""
        end = self.starts[call + 1] if call + 1 < self.calls else self.rows
        return range(int(self.starts[call]), int(end))

    def made_by_infrastructure(self, rows: Codes) -> Flags:
        """Return which rows are of calls made by FSDP or the probe (see `evidence`)."""
        return self.by_text("stack_id", self._infrastructure_stacks.__contains__, False)[rows]

    def uses(self, rows: Codes) -> npt.NDArray[np.int8]:
        """Return the `Use` of each row."""
        columns = [self.texts(name) for name in _USE_COLUMNS]
        codes = np.zeros(len(rows), np.int64)
        for column in columns:
            codes = codes * (len(column.values) + 1) + column.codes[rows] + 1
        codes = codes * 2 + self._selected_by_tensor(rows)
        _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        found = [
            use_of(*(column.text(row) for column in columns), by_tensor=bool(codes[at] % 2))
            for at, row in zip(first.tolist(), rows[first].tolist(), strict=True)
        ]
        return np.asarray(found, np.int8)[inverse.reshape(-1)]

    def _selected_by_tensor(self, rows: Codes) -> Flags:
        """Return which rows are of a `__getitem__` whose index contains a tensor."""
        operators, indexes, dtypes = map(self.texts, ("operator", "index", "dtype"))
        found = np.zeros(len(rows), bool)
        if "__getitem__" not in operators.values:
            return found
        code = operators.values.index("__getitem__")
        for at in np.flatnonzero(operators.codes[rows] == code).tolist():
            found[at] = any(
                dtypes.codes[row] >= 0 and (indexes.text(row) or "").partition(".")[0] == "1"
                for row in self.rows_of(int(self.call_of_row[rows[at]]))
            )
        return found


class PairedCalls(NamedTuple):
    """Paired calls, in execution order of the first side."""

    pairs: Pairs
    only_a: list[int]
    only_b: list[int]
    moved: int
    """Number of pairs whose order differs between the sides."""
    exact: bool
    """False if the sides differ so much that some calls were paired by order of occurrence."""


def pair_calls(a: OperatorColumns, b: OperatorColumns, *, by_shape: bool = True) -> PairedCalls:
    """Pair the calls of two tables; without `by_shape`, shapes of equal calls may differ."""
    kinds = [_column(a, b, "direction"), _column(a, b, "kind")]
    kinds.append(_column(a, b, "operator", plain_path))
    detailed = [
        *kinds,
        _column(a, b, "parent", lambda name: _COUNTER.sub("", plain_path(name))),
        _column(a, b, "source", _function),
    ]
    if by_shape:
        detailed.append(_shapes(a, b))
    first, last = common_ends(*_numbered([*kinds, _numbers(a, b)]))
    in_a, in_b = slice(first, a.calls - last), slice(first, b.calls - last)
    levels = [[side[cut] for side, cut in zip(_numbered(level), (in_a, in_b), strict=True)]
              for level in (detailed, kinds)]  # fmt: skip
    inner, exact = _pair_middle(*levels[0], *levels[1])
    pairs: Pairs = [(index, index) for index in range(first)]
    pairs += [(first + i, first + j) for i, j in inner]
    pairs += [(a.calls - index, b.calls - index) for index in range(last, 0, -1)]
    moved = _by_name(a, b, pairs)
    pairs = sorted([*pairs, *moved])
    left_a = set(range(a.calls)).difference(i for i, _ in pairs)
    left_b = set(range(b.calls)).difference(j for _, j in pairs)
    return PairedCalls(pairs, sorted(left_a), sorted(left_b), len(moved), exact)


def shared_codes(
    a: CodedText, b: CodedText, change: Callable[[str], str] = str
) -> tuple[Codes, Codes]:
    """Return the codes of two columns in one numbering; -1 if unknown.

    Args:
        a, b: the columns.
        change: maps each text to the one that is compared.
    """
    numbers: dict[str, int] = {}
    found = []
    for column in (a, b):
        table = [numbers.setdefault(change(value), len(numbers)) for value in column.values]
        found.append(np.asarray([*table, -1], np.int64)[column.codes])
    return found[0], found[1]


def plain_path(name: str) -> str:
    """Return a name without the parts that wrappers add to a module's path."""
    return _WRAPPERS.sub("", name)


def _pair_middle(
    detailed_a: Codes, detailed_b: Codes, plain_a: Codes, plain_b: Codes
) -> tuple[Pairs, bool]:
    anchors = align(detailed_a, detailed_b)
    if not anchors.ordered:
        # Pairs out of order are no anchors: the coarser level aligns all calls.
        anchors = anchors._replace(pairs=[])
    pairs, exact = list(anchors.pairs), True
    for gap_a, gap_b in _gaps(anchors.pairs, len(plain_a), len(plain_b)):
        gap = gap_a.stop - gap_a.start + gap_b.stop - gap_b.start
        # All gaps together may cost as much as one alignment.
        share = MAX_STEPS * gap // (len(plain_a) + len(plain_b))
        found = align(plain_a[gap_a], plain_b[gap_b], most_steps=share + 1000)
        exact = exact and found.ordered
        pairs += [(gap_a.start + i, gap_b.start + j) for i, j in found.pairs]
    return sorted(pairs), exact


def _gaps(pairs: Pairs, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yield the ranges between pairs that are not empty on either side."""
    i = j = 0
    for next_i, next_j in (*pairs, (rows, columns)):
        if i < next_i and j < next_j:
            yield slice(i, next_i), slice(j, next_j)
        i, j = next_i + 1, next_j + 1


def _by_name(a: OperatorColumns, b: OperatorColumns, pairs: Pairs) -> Pairs:
    """Pair the remaining calls of modules by their full names."""
    one, other = (
        {
            plain_path(side.call_text("name", call) or ""): call
            for call in set(range(side.calls)).difference(paired)
            if side.call_text("module_class", call) is not None
        }
        for side, paired in ((a, (i for i, _ in pairs)), (b, (j for _, j in pairs)))
    )
    return [(call, other[name]) for name, call in one.items() if name in other]


def _column(
    a: OperatorColumns, b: OperatorColumns, name: str, change: Callable[[str], str] = str
) -> tuple[Codes, Codes]:
    codes_a, codes_b = shared_codes(a.texts(name), b.texts(name), change)
    return codes_a[a.starts], codes_b[b.starts]


def _shapes(a: OperatorColumns, b: OperatorColumns) -> tuple[Codes, Codes]:
    """Return a code of each call's tensor shapes."""
    return _numbered_bytes(a, b, *shared_codes(a.texts("shape"), b.texts("shape")))


def _numbers(a: OperatorColumns, b: OperatorColumns) -> tuple[Codes, Codes]:
    """Return a code of each call's statistics, compared as bits: NaN equals NaN."""
    bits = [
        np.stack([side.numbers(name).view(np.int64) for name in ("min", "max", "mean", "norm")], 1)
        for side in (a, b)
    ]
    return _numbered_bytes(a, b, *bits)


def _numbered_bytes(
    a: OperatorColumns, b: OperatorColumns, rows_a: Codes, rows_b: Codes
) -> tuple[Codes, Codes]:
    """Return a code of the rows of each call, in one numbering of both sides."""
    numbers: dict[bytes, int] = {}
    found = []
    for side, rows in ((a, rows_a), (b, rows_b)):
        ends = np.append(side.starts, side.rows)[1:].tolist()
        pieces = (rows[start:end] for start, end in zip(side.starts.tolist(), ends, strict=True))
        codes = [numbers.setdefault(piece.tobytes(), len(numbers)) for piece in pieces]
        found.append(np.asarray(codes, np.int64))
    return found[0], found[1]


def _numbered(columns: Sequence[tuple[Codes, Codes]]) -> tuple[Codes, Codes]:
    """Return a code of each row of several columns, in one numbering of both sides."""
    rows = np.stack([np.concatenate(column) for column in columns], axis=1)
    codes = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    calls = len(columns[0][0])
    return codes[:calls], codes[calls:]


def _function(source: str) -> str:
    """Return file and function of a source; lines and directories differ between versions."""
    found = _SOURCE.match(source)
    return source if found is None else f"{found['file']} {found['function']}"

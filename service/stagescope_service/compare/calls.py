"""The calls of two operator tables, paired although their counters differ.

A counter is no identity: one extra `linear` on one side, and every later one has another number.
Calls are paired by what they are and where, in order, at two levels of likeness:

1. direction, module path or API, the module around it, file and function of the source (no line:
   code moves) and the shapes of its tensors;
2. where that leaves gaps, direction and module path or API alone: other sizes, other sources.

Before that, what is equal in every number at the beginning and at the end is paired, so that an
extra call in the middle of its likes is not taken for its neighbour. A module that is called at
another place of the order than on the other side is paired by its full name at last.

The parts of a path that wrappers add (FSDP, checkpointing, torch.compile) do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from stagescope_service.compare.sequences import MOST_STEPS, Codes, Pairs, common_ends, match
from stagescope_service.dumps.operator_query import CodedText, load_columns

_WRAPPERS: Final = re.compile(
    r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\."
)
_COUNTER: Final = re.compile(r"\.\d+(?=\Z|\.(?:forward|backward|debug)\Z)")
_SOURCE: Final = re.compile(r"(?:.*/)?(?P<file>[^/]*):\d+ in (?P<function>.*)\Z")

_COLUMNS: Final = (
    "order", "name", "kind", "operator", "module_class", "direction", "source", "stack_id",
    "parent", "section", "index", "type", "dtype", "shape", "min", "max", "mean", "norm",
    "non_finite", "checksum", "value", "placements",
)  # fmt: skip


class Operators:
    """One operator table in memory, a row an argument, with where each call begins."""

    def __init__(self, path: Path) -> None:
        columns = load_columns(path, _COLUMNS)
        self._columns = columns
        self.rows = len(columns["order"])
        order = columns["order"]
        # A call has at least one row, and its rows stand together.
        self.starts: Codes = np.flatnonzero(np.diff(order, prepend=-1)).astype(np.int64)
        self.call_of_row: Codes = np.cumsum(np.diff(order, prepend=-1) != 0) - 1
        self.shapes = [None if shape is None else tuple(shape) for shape in columns["shape"]]

    @property
    def calls(self) -> int:
        """How many calls there are."""
        return len(self.starts)

    def texts(self, column: str) -> CodedText:
        """Return a column of texts."""
        found: CodedText = self._columns[column]
        return found

    def numbers(self, column: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return min, max, mean or norm of each row; unknown is NaN (see `known`)."""
        found: np.ndarray[Any, np.dtype[np.float64]] = self._columns[column]
        return found

    def known(self, column: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return where a column of numbers has one, be it a NaN."""
        found: np.ndarray[Any, np.dtype[np.bool_]] = self._columns[f"{column}_known"]
        return found

    def call_text(self, column: str, call: int) -> str | None:
        """Return what a column says of a call."""
        return self.texts(column).text(int(self.starts[call]))

    def rows_of(self, call: int) -> range:
        """Return the rows of a call."""
        end = self.starts[call + 1] if call + 1 < self.calls else self.rows
        return range(int(self.starts[call]), int(end))


class PairedCalls(NamedTuple):
    """Which calls belong together, in execution order of the first side."""

    pairs: Pairs
    only_a: list[int]
    only_b: list[int]
    moved: int
    """Pairs whose order differs between the sides."""
    exact: bool
    """False where the sides differ so much that some were paired by order of occurrence."""


def pair_calls(a: Operators, b: Operators) -> PairedCalls:
    """Pair the calls of two tables."""
    first, last = _equal_ends(a, b)
    at_a, at_b = range(first, a.calls - last), range(first, b.calls - last)
    pairs: Pairs = [(index, index) for index in range(first)]
    inner, exact = _pair_middle(a, b, at_a, at_b)
    pairs += inner
    pairs += [(a.calls - index, b.calls - index) for index in range(last, 0, -1)]
    moved = _by_name(a, b, pairs)
    pairs = sorted([*pairs, *moved])
    left_a = set(range(a.calls)).difference(i for i, _ in pairs)
    left_b = set(range(b.calls)).difference(j for _, j in pairs)
    return PairedCalls(pairs, sorted(left_a), sorted(left_b), len(moved), exact)


def plain_path(name: str) -> str:
    """Return a name without the parts that wrappers add to a module's path."""
    return _WRAPPERS.sub("", name)


def _pair_middle(a: Operators, b: Operators, at_a: range, at_b: range) -> tuple[Pairs, bool]:
    codes_a, codes_b = _codes(_places(a, at_a), _places(b, at_b))
    anchors = match(codes_a, codes_b)
    if not anchors.ordered:
        # Pairs out of order are no anchors; the coarser level has a try at the whole.
        anchors = anchors._replace(pairs=[])
    kinds_a, kinds_b = _codes(_kinds(a, at_a), _kinds(b, at_b))
    pairs, exact = list(anchors.pairs), True
    for gap_a, gap_b in _gaps(anchors.pairs, len(at_a), len(at_b)):
        gap = gap_a.stop - gap_a.start + gap_b.stop - gap_b.start
        # All gaps together cost what one alignment may cost.
        share = MOST_STEPS * gap // (len(at_a) + len(at_b))
        found = match(kinds_a[gap_a], kinds_b[gap_b], most_steps=share + 1000)
        exact = exact and found.ordered
        pairs += [(gap_a.start + i, gap_b.start + j) for i, j in found.pairs]
    return [(at_a.start + i, at_b.start + j) for i, j in sorted(pairs)], exact


def _gaps(pairs: Pairs, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yield the stretches between pairs that have something on both sides."""
    i = j = 0
    for next_i, next_j in (*pairs, (rows, columns)):
        if i < next_i and j < next_j:
            yield slice(i, next_i), slice(j, next_j)
        i, j = next_i + 1, next_j + 1


def _equal_ends(a: Operators, b: Operators) -> tuple[int, int]:
    return common_ends(*_codes(_contents(a, range(a.calls)), _contents(b, range(b.calls))))


def _by_name(a: Operators, b: Operators, pairs: Pairs) -> Pairs:
    """Pair what is left of modules by their full names."""
    with_a, with_b = {i for i, _ in pairs}, {j for _, j in pairs}
    names = {
        plain_path(name): call
        for call in range(b.calls)
        if call not in with_b and (name := b.call_text("name", call)) and _is_module(b, call)
    }
    found: Pairs = []
    for call in range(a.calls):
        if call in with_a or not _is_module(a, call):
            continue
        other = names.pop(plain_path(a.call_text("name", call) or ""), None)
        if other is not None:
            found.append((call, other))
    return found


def _is_module(side: Operators, call: int) -> bool:
    return side.call_text("module_class", call) is not None


def _kinds(side: Operators, calls: range) -> list[Any]:
    """What each call is: direction, kind, and module path or API."""
    return [
        (
            side.call_text("direction", call),
            side.call_text("kind", call),
            plain_path(side.call_text("operator", call) or ""),
        )
        for call in calls
    ]


def _places(side: Operators, calls: range) -> list[Any]:
    """What each call is and where: also the module around it, its function and its shapes."""
    return [
        (
            kind,
            _COUNTER.sub("", plain_path(side.call_text("parent", call) or "")),
            _function(side.call_text("source", call)),
            tuple(side.shapes[row] for row in side.rows_of(call)),
        )
        for call, kind in zip(calls, _kinds(side, calls), strict=True)
    ]


def _contents(side: Operators, calls: range) -> list[Any]:
    """What each call is and all its numbers."""
    columns = [side.numbers(name) for name in ("min", "max", "mean", "norm")]
    # Bits, so that NaN equals NaN.
    bits = np.stack([column.view(np.int64) for column in columns], axis=1)
    ends = np.append(side.starts[1:], side.rows)
    return [
        (kind, bits[side.starts[call] : ends[call]].tobytes())
        for call, kind in zip(calls, _kinds(side, calls), strict=True)
    ]


def _function(source: str | None) -> tuple[str, str] | None:
    found = _SOURCE.match(source) if source else None
    return None if found is None else (found["file"], found["function"])


def _codes(a: Sequence[Any], b: Sequence[Any]) -> tuple[Codes, Codes]:
    """Number the different values of two sequences alike."""
    numbers: dict[Any, int] = {}
    coded_a = [numbers.setdefault(value, len(numbers)) for value in a]
    coded_b = [numbers.setdefault(value, len(numbers)) for value in b]
    return np.asarray(coded_a, np.int64), np.asarray(coded_b, np.int64)

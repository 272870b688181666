"""Put the tensors of several ranks together, so that two dumps of other layouts compare.

The result is an operator table again: the rows of the side's first rank, with the shape and the
statistics of the whole tensor. The comparison of two tables (`differences`) then applies unchanged.

Statistics of shards add up exactly: the largest Max, the least Min, the mean of the Means weighted
by elements, and the root of the sum of squares of the Norms. Of a sum of parts (the output of a
row-parallel layer before its all-reduce) the mean is the sum of the means. Its other statistics
need full tensors (task `tensor`), which are added here. Without them only the mean is compared.

If ranks differ that the shapes make replicas, their tensor is a sum of parts in these cases:

* it is a result, and another tensor of its call is sharded over the same axis (the input and the
  weight of a row-parallel layer, the rows of a loss);
* it is the gradient of a parameter;
* it has the numbers of such a result of an earlier call.

In all other cases the replicas differ. The one that is farthest from the other side counts, so that
the difference shows. Whole numbers that differ in a call with shards are local indexes, such as the
token ids of a vocabulary-parallel embedding. Nothing that such a call looks up is compared.

The mean of a loss over the rows of one rank has larger gradients than over the rows of all ranks.
The first gradient that is sharded over `dp` shows the factor: 1, or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from stagescope_service.compare.operators.calls import (
    Flags,
    OperatorColumns,
    PairedCalls,
    pair_calls,
)
from stagescope_service.compare.operators.counts import JoinedRows, join_rows
from stagescope_service.compare.operators.differences import Thresholds
from stagescope_service.compare.operators.layouts import ShardRule
from stagescope_service.compare.operators.rank_side import Side
from stagescope_service.compare.operators.readings import (
    Reading,
    cannot_join,
    whole_shape,
)
from stagescope_service.compare.operators.side_joiner import SideJoiner
from stagescope_wire.errors import InvalidInput
from stagescope_wire.render import counted

_INPUTS: Final = ("input_args", "input_kwargs")
_OTHER_INPUT: Final = "one side adds another input, such as a bias, in a later call"


class JoinedTables(NamedTuple):
    """Both sides with whole tensors.

    Attributes:
        a, b: the tables.
        paired: their paired calls.
        left_out: which rows of each table cannot be compared.
        readings: how each row of each side was put together.
        scales: factor of the gradients of each side.
        sizes: number of values that are sizes of shards.
        sums_by_mean: number of sums of which only the mean is known.
        unequal_parameters: rows of each side that are parameters whose replicas differ.
    """

    a: OperatorColumns
    b: OperatorColumns
    paired: PairedCalls
    left_out: tuple[Flags, Flags]
    readings: tuple[Mapping[int, Reading], Mapping[int, Reading]]
    scales: tuple[float, float]
    sizes: int
    sums_by_mean: int
    unequal_parameters: tuple[list[int], list[int]]


def join_ranks(
    a: Side, b: Side, thresholds: Thresholds, rules: Sequence[ShardRule] = ()
) -> JoinedTables:
    """Put the tensors of both sides together.

    Args:
        a, b: the ranks of each side; one of them may have one rank.
        thresholds: relative differences up to which replicas are equal.
        rules: of the user; the first that matches a tensor counts.

    Raises:
        InvalidInput: a rule counts for no tensor.
    """
    paired = pair_calls(a.base, b.base, by_shape=False)
    rows = join_rows(a.base, b.base, paired)
    both = np.flatnonzero((rows.row_a >= 0) & (rows.row_b >= 0))
    sides = (SideJoiner(a, thresholds, rules), SideJoiner(b, thresholds, rules))
    for at in both.tolist():
        _read_row(sides, rows, at)
    _refuse_unused(sides, rules)
    for side in sides:
        side.find_sums()
    _leave_unequal_sums(sides, rows)
    for side in sides:
        side.merge_all()
    pairs = list(zip(rows.row_a[both].tolist(), rows.row_b[both].tolist(), strict=True))
    for side, other, at in ((sides[0], sides[1], 0), (sides[1], sides[0], 1)):
        partners = {pair[at]: pair[1 - at] for pair in pairs}
        side.scale_gradients(other, partners)
        side.settle(other, partners)
    left_out = _left_out(sides, rows)
    one, other = sides
    return JoinedTables(
        one.table(),
        other.table(),
        paired,
        left_out,
        (one.readings, other.readings),
        (one.scale, other.scale),
        sizes=len(one.values) + len(other.values),
        sums_by_mean=one.sums_by_mean() + other.sums_by_mean(),
        unequal_parameters=(one.unequal_parameters(), other.unequal_parameters()),
    )


def _refuse_unused(sides: tuple[SideJoiner, SideJoiner], rules: Sequence[ShardRule]) -> None:
    used = sides[0].used | sides[1].used
    for rule in rules:
        if rule.pattern not in used:
            layouts = " or ".join(each.side.grid.text() for each in sides if each.side.grid.axes)
            raise InvalidInput(
                f"the shard rule {rule.pattern!r:.200} of {', '.join(rule.ways)} counts for no "
                "tensor",
                expected="a pattern of NAME.SECTION.INDEX that matches a tensor before other rules "
                f"do, and an axis of the layout ({layouts})",
                advice="`stagescope operators` lists the names",
            )


def _read_row(sides: tuple[SideJoiner, SideJoiner], rows: JoinedRows, at: int) -> None:
    """Find out how a row of both sides is put together."""
    row = (int(rows.row_a[at]), int(rows.row_b[at]))
    shapes = [each.side.text("shape", r) for each, r in zip(sides, row, strict=True)]
    if None in shapes:
        if shapes == [None, None]:
            for one, other, r, s in ((sides[0], sides[1], *row), (sides[1], sides[0], *row[::-1])):
                one.read_value(r, other.side.text("value", s))
        return
    sizes = [each.side.sizes_of(r) for each, r in zip(sides, row, strict=True)]
    size_a, size_b = sizes
    whole = None if size_a is None or size_b is None else whole_shape(size_a, size_b)
    reason = _unequal(sides, row) if whole is None else ""
    for each, r, own in zip(sides, row, sizes, strict=True):
        each.read_tensor(r, own, whole, reason)


def _unequal(sides: tuple[SideJoiner, SideJoiner], row: tuple[int, int]) -> str:
    """Return why a tensor of both sides has no whole."""
    shapes = []
    for each, r in zip(sides, row, strict=True):
        texts = each.side.texts("shape", r)
        if None in texts:
            rank = each.side.grid.ranks[texts.index(None)]
            return f"rank {rank} did not record it"
        of_ranks = f" of {counted(len(texts), 'rank')}" if len(texts) > 1 else ""
        shapes.append(" and ".join(dict.fromkeys(filter(None, texts))) + of_ranks)
    return f"{shapes[0]} and {shapes[1]} make no tensor in common"


def _leave_unequal_sums(sides: tuple[SideJoiner, SideJoiner], rows: JoinedRows) -> None:
    """Leave out sums of calls in which one side has another input: it may be added to the sum.

    A row-parallel layer adds its bias after the all-reduce; a layer of one rank, in the same call.
    """
    only = (rows.row_a < 0) | (rows.row_b < 0)
    for at in np.flatnonzero(only).tolist():
        row = max(int(rows.row_a[at]), int(rows.row_b[at]))
        owner = sides[0] if rows.row_a[at] >= 0 else sides[1]
        if owner.side.text("dtype", row) is None or owner.side.text("section", row) not in _INPUTS:
            continue
        for of_pair in np.flatnonzero((rows.pair == rows.pair[at]) & ~only).tolist():
            for side, own in zip(sides, (rows.row_a[of_pair], rows.row_b[of_pair]), strict=True):
                reading = side.readings.get(int(own))
                if reading is not None and reading.is_partial:
                    side.readings[int(own)] = cannot_join(side.side.grid, _OTHER_INPUT)
                    owner.readings[row] = cannot_join(owner.side.grid, _OTHER_INPUT)


def _left_out(sides: tuple[SideJoiner, SideJoiner], rows: JoinedRows) -> tuple[Flags, Flags]:
    """Return which rows of each side cannot be compared: a reason on one side is one for both."""
    found = [np.zeros(side.side.base.rows, bool) for side in sides]
    for row_a, row_b in zip(rows.row_a.tolist(), rows.row_b.tolist(), strict=True):
        reasons = [
            row >= 0 and row in side.readings and bool(side.readings[row].reason)
            for side, row in zip(sides, (row_a, row_b), strict=True)
        ]
        if any(reasons):
            for flags, row in zip(found, (row_a, row_b), strict=True):
                if row >= 0:
                    flags[row] = True
    return found[0], found[1]

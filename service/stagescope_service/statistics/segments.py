"""The locations of the model's tokens: contiguous stretches of the mask, with their round.

A **run** is a maximal stretch of 1s in a row; it also ends where `positions` jump (context-parallel
parts, zigzag). The round of a run is its index in the row plus `round_offset`, or its value in
`round_ids`. A **segment** is a part of a run with constant round, turn and version and no skipped
token. A **stretch** is a run, or an unskipped piece of one, as positions of its sample.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final, NamedTuple

import numba
import numpy as np

from stagescope_service.rows.positions import continues, positions_of
from stagescope_service.statistics.cell import Int64, Mask, UInt8
from stagescope_service.statistics.jit import (
    allocating,
    entry,
    exact,
    input_type,
    prefetch,
    tuple_type,
)

Found = tuple[Int64, int, int]
"""(segments, index of a wrong mask value or -1, index of a negative round id or -1)."""

_BLOCK: Final = 128
_AHEAD: Final = 2048
"""Distance in tokens at which the search asks for the mask."""
_LINE: Final = 64
"""Bytes of a line of the processor's caches."""


@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of a batch.

    Attributes:
        table: int64 [segments, 6]: start, stop, row, round, turn, version.
        cover: int64 [stretches, 4]: row, positions first to last (half open), all of them model
            tokens, and the index of the first.
    """

    table: Int64
    cover: Int64
    bad_mask: int
    """Index of a mask value other than 0 and 1, else -1."""
    bad_round: int
    """Index of a negative round id under the mask, else -1."""


_NONE: Final[Int64] = np.empty(0, np.int64)
_NO_SKIP: Final[UInt8] = np.empty(0, np.uint8)


class TokenColumns(NamedTuple):
    """Columns besides the mask that end a run or a segment: arrays [tokens]."""

    positions: Int64 | None = None
    round_ids: Int64 | None = None
    turn_ids: Int64 | None = None
    versions: Int64 | None = None
    skip: UInt8 | None = None
    """1 where a token must not count; rounds do not change."""


_MASK_ALONE: Final = TokenColumns()

_I8 = input_type(numba.int64)
_RESULT = tuple_type(numba.int64[:, ::1], numba.int64, numba.int64)
_MASKS = [input_type(kind) for kind in (numba.uint8, numba.uint32, numba.uint64)]


@allocating
def _grown(rows: Int64, used: int) -> Int64:
    if used < rows.shape[0]:
        return rows
    larger = np.empty((2 * rows.shape[0], rows.shape[1]), np.int64)
    for i in range(used):
        for j in range(rows.shape[1]):
            larger[i, j] = rows[i, j]
    return larger


@allocating
def _put(table: Int64, n: int, start: int, stop: int, row: int, number: int) -> Int64:
    # Element by element: a tuple or a slice would add seconds of compile time for broadcasting.
    table[n, 0], table[n, 1], table[n, 2] = start, stop, row
    table[n, 3], table[n, 4], table[n, 5] = number, -1, 0
    return _grown(table, n + 1)


@exact
def _first_other(mask: Mask, start: int, end: int, value: np.unsignedinteger[Any]) -> int:
    """Return the first index from `start` whose value is not `value`, `end` if there is none.

    Whole blocks are compared first: that vectorizes. The search asks for the mask ahead: at the end
    of a run the processor alone would stop doing so.
    """
    line = _LINE // mask.itemsize
    for i in range(start, end, _BLOCK):
        for at in range(i + _AHEAD, i + _AHEAD + _BLOCK, line):
            prefetch(mask, at)
        stop = i + _BLOCK if i + _BLOCK < end else end
        block, difference = mask[i:stop], value ^ value
        for j in range(block.size):
            difference |= block[j] ^ value
        if difference != value ^ value:
            first = i
            while mask[first] == value:
                first += 1
            return first
    return end


@entry(*(_RESULT(mask, numba.uint64, _I8, _I8) for mask in _MASKS), nogil=True)
def _find_plain(mask: Mask, one: np.uint64, offsets: Int64, row_round: Int64) -> Found:
    """Find segments by the mask alone."""
    off = mask[0] ^ mask[0] if mask.size else one ^ one
    on = mask.dtype.type((off + one) if mask.size else one)
    off = mask.dtype.type(off)
    table, n = np.empty((64, 6), np.int64), 0
    for row in range(offsets.size - 1):
        end, number = offsets[row + 1], row_round[row]
        start = _first_other(mask, offsets[row], end, off)
        while start < end:
            if mask[start] != on:
                return table[:n], start, -1
            stop = _first_other(mask, start, end, on)
            if stop < end and mask[stop] != off:
                return table[:n], stop, -1
            table = _put(table, n, start, stop, row, number)
            n, number = n + 1, number + 1
            start = _first_other(mask, stop, end, off)
    return table[:n], -1, -1


@entry(_RESULT(_MASKS[0], numba.uint64, _I8, _I8, _I8, _I8, _I8, _I8, _MASKS[0]))
def _find_general(
    mask: Mask, one: np.uint64, offsets: Int64, row_round: Int64,
    positions: Int64, rounds: Int64, turns: Int64, versions: Int64, skip: UInt8,
) -> Found:  # fmt: skip
    """Find segments if anything besides the mask can end a run or a segment."""
    table, n = np.empty((64, 6), np.int64), 0
    for row in range(offsets.size - 1):
        begin, end = offsets[row], offsets[row + 1]
        number, start, inside, last = row_round[row] - 1, -1, False, -1
        for j in range(begin, end + 1):
            on = False
            if j < end:
                on = mask[j] == one
                if not on and mask[j] != 0:
                    return table[:n], j, -1
                if on and rounds.size > 0 and rounds[j] < 0:
                    return table[:n], -1, j
            jump = on and last >= 0 and positions.size > 0
            jump = jump and positions[j] != positions[last] + (j - last)
            skipped = on and skip.size > 0 and skip[j] != 0
            cut = not on or jump or skipped
            if start >= 0 and not cut:
                cut = (
                    (rounds.size > 0 and rounds[j] != rounds[start])
                    or (turns.size > 0 and turns[j] != turns[start])
                    or (versions.size > 0 and versions[j] != versions[start])
                )
            if start >= 0 and cut:
                table[n, 0], table[n, 1], table[n, 2] = start, j, row
                table[n, 3] = rounds[start] if rounds.size > 0 else number
                table[n, 4] = turns[start] if turns.size > 0 else -1
                table[n, 5] = versions[start] if versions.size > 0 else 0
                n, start = n + 1, -1
                table = _grown(table, n)
            number += on and (jump or not inside)
            inside = on
            if on:
                last = j
                if not skipped:
                    start = j if start < 0 else start
    return table[:n], -1, -1


def find(
    mask: Mask,
    one: int,
    row_offsets: Int64,
    *,
    token_offset: Int64 | None = None,
    round_offset: Int64 | None = None,
    columns: TokenColumns = _MASK_ALONE,
) -> Segments:
    """Find the segments of a flat mask.

    Args:
        mask: uint8, uint32 or uint64 [tokens], the bit patterns of the mask's own dtype.
        one: The bit pattern of 1 in that dtype.
        row_offsets: int64 [rows + 1].
        token_offset: int64 [rows], position of each row's first token in its sample; default 0.
        round_offset: int64 [rows], round of each row's first run in its sample; default 0.
        columns: further columns that may end a run or a segment.
    """
    row_round = np.zeros(len(row_offsets) - 1, np.int64) if round_offset is None else round_offset
    common = (mask, np.uint64(one), row_offsets, row_round)
    if all(column is None for column in columns):
        table, bad_mask, bad_round = _find_plain(*common)
    else:
        # The compiled function accepts uint8 only: numba rejects a wider mask.
        positions, rounds, turns, versions = (
            _NONE if column is None else column for column in columns[:-1]
        )
        skip = _NO_SKIP if columns.skip is None else columns.skip
        table, bad_mask, bad_round = _find_general(
            *common, positions, rounds, turns, versions, skip
        )
    cover = _cover(table, row_offsets, columns.positions, token_offset)
    return Segments(table, cover, bad_mask, bad_round)


def _cover(
    table: Int64, row_offsets: Int64, positions: Int64 | None, token_offset: Int64 | None
) -> Int64:
    """Return the stretches that segments [segments, 6] cover, [stretches, 4] by `COVER`."""
    start, stop, row = table[:, 0], table[:, 1], table[:, 2]
    # Segments of one run, split where round, turn or version change, are one stretch.
    goes_on = continues(start, row, row_offsets, positions)
    goes_on[1:] &= start[1:] == stop[:-1]
    goes_on[:1] = False
    at = np.flatnonzero(~goes_on)
    begin, row = start[at], row[at]
    length = stop[np.append(at[1:], len(table)) - 1] - begin if len(at) else begin
    first = positions_of(begin, row, row_offsets, positions, token_offset)
    return np.stack([row, first, first + length, begin], axis=1)

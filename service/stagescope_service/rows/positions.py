"""Positions of tokens in their samples: they join the fragments of a sample.

Context-parallel ranks hold every sample in fragments (with zigzag two each), and a long sample may
be split. `positions` gives the position of each token in its sample, `token_offset` the position of
each row's first token; see `stagescope_wire.tensors.PAYLOAD_TENSORS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np

from stagescope_service.rows.ragged import Bools, Int64, RowBlock, is_in_row, row_block
from stagescope_wire.errors import InvalidTensor
from stagescope_wire.tensorfile import WireTensor

POSITION_TENSORS: Final = frozenset({"positions", "token_offset"})
_SPARSE: Final = 8
"""Slots a token in a table of all positions, above which the table has only those in use."""


def has_positions(names: Iterable[str]) -> bool:
    """Return whether a payload with these tensors gives its tokens' positions in their samples."""
    return not POSITION_TENSORS.isdisjoint(names)


def positions_of(
    token: Int64, row: Int64, offsets: Int64, positions: Int64 | None, token_offset: Int64 | None
) -> Int64:
    """Return the positions of tokens in their samples.

    They are the recorded ones, else the tokens' columns in their rows plus the rows' offsets.

    Args:
        token: indexes of tokens in flat rows.
        row: the row of each of them.
        offsets: int64 [rows + 1], bounds of the rows.
        positions: of all tokens of the rows, or None.
        token_offset: [rows], position of each row's first token, or None: 0.
    """
    if positions is not None:
        return positions[token]
    column: Int64 = token - offsets[row]
    return column if token_offset is None else column + token_offset[row]


def continues(token: Int64, row: Int64, offsets: Int64, positions: Int64 | None) -> Bools:
    """Return whether the token before each one is the one before it in its sample, too.

    A token outside of `row`, or at its beginning, continues nothing. Arguments: see `positions_of`.
    """
    inside: Bools = (token > offsets[row]) & (token < offsets[row + 1])
    if positions is not None and inside.any():
        at = np.where(inside, token, 0)
        inside &= positions[at] == positions[at - inside] + 1
    return inside


@dataclasses.dataclass(frozen=True, slots=True)
class TokenIndex:
    """Finds tokens by sample and position.

    Attributes:
        repeats: int64 [2, repeats], tokens of the same sample and position: each with the next one.
    """

    repeats: Int64
    _low: int
    _span: int
    _keys: Int64 | None
    """sample * span + position - low of the tokens, ascending; None: every key has a slot."""
    _table: Int64
    """[keys] or [samples * span], the token that counts, or -1."""

    @classmethod
    def build(cls, sample: Int64, position: Int64, samples: int) -> TokenIndex:
        """Index tokens; the last of several with the same sample and position counts.

        Args:
            sample: int64 [tokens], number of each token's sample, from 0.
            position: int64 [tokens], its position in the sample.
            samples: number of samples.

        Raises:
            InvalidTensor: positions outside of any sample.
        """
        count = len(position)
        low = int(position.min()) if count else 0
        span = int(position.max()) - low + 1 if count else 0
        if span * (samples + 1) >= 1 << 62:
            raise InvalidTensor(f"positions from {low} to {low + span - 1}", expected="< 2^32")
        at, keys, size = sample * span + (position - low), None, samples * span
        if size > _SPARSE * count:
            keys, at = np.unique(at, return_inverse=True)
            size = len(keys)
        table, repeats = _table_of(np.arange(count), at, max(size, 1))
        return cls(repeats, low, span, keys, table)

    @property
    def tokens(self) -> Int64:
        """The tokens that count, by sample and then by position."""
        return self._table[self._table >= 0]

    def find(self, sample: Int64, position: Int64) -> tuple[Int64, Bools]:
        """Return the token of each (sample, position), and whether there is one.

        A negative sample is unknown.
        """
        at, inside = self._slots(sample, position)
        token = self._table[at]
        return token, inside & (token >= 0)

    def pair(self, sample: Int64, position: Int64) -> tuple[Int64, Int64]:
        """Return the other tokens that the index also has, and the index's own token of each.

        The order is that of their samples and positions.

        Raises:
            InvalidTensor: a sample of either side has a position twice, as padding may have.
        """
        at, inside = self._slots(sample, position)
        others = np.flatnonzero(inside)
        table, repeats = _table_of(others, at[others], len(self._table))
        if repeats.size or self.repeats.size:
            raise InvalidTensor("positions repeat in a row", expected="each position once")
        both = (table >= 0) & (self._table >= 0)
        return table[both], self._table[both]

    def _slots(self, sample: Int64, position: Int64) -> tuple[Int64, Bools]:
        """Return the slot of each (sample, position) in the table, and whether it has one."""
        column = position - self._low
        inside = (sample >= 0) & (column >= 0) & (column < self._span)
        at = np.where(inside, sample * self._span + column, 0)
        if self._keys is not None:
            wanted, last = at, len(self._keys) - 1
            at = np.minimum(np.searchsorted(self._keys, wanted), last)
            inside &= self._keys[at] == wanted
        return at, inside


def _table_of(tokens: Int64, at: Int64, size: int) -> tuple[Int64, Int64]:
    """Return a table [size] of the tokens in their slots `at`, -1 elsewhere, and the repeats."""
    table = np.full(size, -1, np.int64)
    table[at] = tokens
    if np.count_nonzero(table >= 0) == len(tokens):
        return table, np.empty((2, 0), np.int64)
    order = np.argsort(at, kind="stable")
    again = at[order][1:] == at[order][:-1]
    last = order[np.append(~again, True)]
    table[at[last]] = tokens[last]
    return table, np.stack([tokens[order[:-1][again]], tokens[order[1:][again]]])


class TokenPositions(NamedTuple):
    """Positions of the tokens of padded rows in their samples.

    Attributes:
        positions: int64 [rows, width].
        counted: bool [rows, width]: tokens that the mask counts.
        present: bool [rows, width]: these, and others that are not padding.
    """

    positions: Int64
    counted: Bools
    present: Bools

    @property
    def span(self) -> int:
        """One more than the last position."""
        return int(self.positions[self.present].max(initial=-1)) + 1


def token_positions(tensors: Mapping[str, WireTensor], rows: int) -> TokenPositions | None:
    """Return the positions of the tokens of rows; None if not recorded, or inconsistent."""
    mask = _padded(tensors, "response_mask", rows)
    if mask is None or mask.values.ndim != 2:
        return None
    counted: Bools = mask.values != 0
    present = np.ones_like(counted)
    if mask.lengths is not None:
        present = is_in_row(mask.lengths, mask.width, "right")
    recorded = _padded(tensors, "positions", rows)
    offset = _padded(tensors, "token_offset", rows)
    if recorded is not None and recorded.values.shape == counted.shape:
        positions = recorded.values.astype(np.int64)
        if mask.lengths is None:  # padding begins where the positions stop increasing
            present[:, 1:] = np.logical_and.accumulate(np.diff(positions, axis=1) > 0, axis=1)
    elif offset is not None and offset.values.shape == (rows,):
        positions = offset.values.astype(np.int64)[:, None] + np.arange(mask.width)
        if mask.lengths is None:  # beyond a row's last counted token its length is unknown
            present = np.logical_or.accumulate(counted[:, ::-1], axis=1)[:, ::-1]
    else:
        return None
    present &= positions >= 0
    is_consistent = not (counted & ~present).any()
    return TokenPositions(positions, counted, present) if is_consistent else None


def _padded(tensors: Mapping[str, WireTensor], name: str, rows: int) -> RowBlock | None:
    return row_block(tensors[name], rows, "right") if name in tensors else None

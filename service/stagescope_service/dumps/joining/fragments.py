"""Samples whose tokens lie in several rows, assembled by the token positions of the rows.

Context-parallel ranks hold every sample in fragments (with zigzag two each), and a long sample may
be split. `positions` gives the position of each token in its sample, `token_offset` the position of
each row's first token; see `schema.PAYLOAD_TENSORS`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from stagescope.tensorfile import Array
from stagescope_service.dumps.joining.column import (
    Bools,
    Int64,
    RowBlock,
    bits,
    row_block,
)
from stagescope_service.store.tensorfile import WireTensor

POSITION_TENSORS: Final = frozenset({"positions", "token_offset"})

_FILLED: Final = 1
_COUNTED: Final = 2


class TokenPositions(NamedTuple):
    """Positions of the tokens of a part's rows in their samples.

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
        present = np.arange(mask.width) < mask.lengths[:, None]
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


def checksum(before: str, tensors: Mapping[str, WireTensor]) -> str:
    """Return a hash of tensors that continues the hash `before`; replicas have the same."""
    found = hashlib.blake2b(before.encode(), digest_size=12)
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(np.ascontiguousarray(tensors[name][2]).view(np.uint8).data)
    return found.hexdigest()


class Assembly:
    """One tensor of one pass, assembled from fragments; begins as zeros.

    Args:
        tag: dtype tag.
        values: [rows, span, ...] of all samples; is overwritten.
    """

    def __init__(self, tag: str, values: Array) -> None:
        self.tag = tag
        self.values = values
        self.values[...] = 0
        self._state = np.zeros(values.shape[:2], np.uint8)
        self.differing = 0
        """Values of tokens that two fragments hold and that differ."""

    def write(self, rows: Int64, tokens: TokenPositions, values: Array) -> None:
        """Write the tokens of a part's rows; counted tokens replace others."""
        uncounted = tokens.present & ~tokens.counted
        for selected, state in ((tokens.counted, _COUNTED), (uncounted, _FILLED)):
            row, token = np.nonzero(selected)
            target, position = rows[row], tokens.positions[row, token]
            state_before = self._state[target, position]
            again = state_before == state
            ours = self.values[target[again], position[again]]
            differ = bits(ours) != bits(np.ascontiguousarray(values[row[again], token[again]]))
            self.differing += int(differ.sum())
            free = state_before < state
            self.values[target[free], position[free]] = values[row[free], token[free]]
            self._state[target[free], position[free]] = state

    def finish(self) -> tuple[Int64, RowBlock, Int64]:
        """Return the rows that were written, their values with lengths, and the rows with holes."""
        present = self._state > 0
        rows = np.flatnonzero(present.any(axis=1))
        ends = np.arange(present.shape[1]) + 1
        lengths = (present * ends).max(axis=1, initial=0)[rows].astype(np.int64)
        holes = rows[present[rows].sum(axis=1) < lengths]
        return rows, RowBlock(self.tag, self.values[rows], lengths), holes


def _padded(tensors: Mapping[str, WireTensor], name: str, rows: int) -> RowBlock | None:
    return row_block(tensors[name], rows, "right") if name in tensors else None

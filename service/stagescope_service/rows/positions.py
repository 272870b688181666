"""Positions of tokens in their samples, by which fragments of a sample find each other.

Context-parallel ranks hold every sample in fragments (with zigzag two each), and a long sample may
be split. `positions` gives the position of each token in its sample, `token_offset` the position of
each row's first token; see `schema.PAYLOAD_TENSORS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from stagescope.tensorfile import WireTensor
from stagescope.wire.errors import InvalidTensor
from stagescope_service.rows.ragged import Bools, Int64, RowBlock, is_in_row, row_block

POSITION_TENSORS: Final = frozenset({"positions", "token_offset"})


class TokenIndex(NamedTuple):
    """Finds tokens by sample and position.

    Attributes:
        tokens: int64 [keys], which token counts for each (sample, position), in their order.
        repeats: int64 [2, repeats], tokens of the same sample and position: each with the next one.
        keys: int64 [keys]: sample * span + position - low, ascending.
        low, span: the lowest position, and the number of positions from there to the highest.
    """

    tokens: Int64
    repeats: Int64
    keys: Int64
    low: int
    span: int

    @classmethod
    def of(cls, sample: Int64, position: Int64, samples: int, *, newest: bool = True) -> TokenIndex:
        """Index tokens.

        Args:
            sample: int64 [tokens], number of each token's sample, from 0.
            position: int64 [tokens], its position in the sample.
            samples: number of samples.
            newest: of a repeated position the last token counts, else the first.

        Raises:
            InvalidTensor: positions outside of any sample.
        """
        low = int(position.min()) if position.size else 0
        span = int(position.max()) - low + 1 if position.size else 1
        if span * (samples + 1) >= 1 << 62:
            raise InvalidTensor(f"positions from {low} to {low + span - 1}", expected="< 2^32")
        keys = sample * span + position - low
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        repeated = ordered[1:] == ordered[:-1]
        counts = np.ones(len(order), bool)
        counts[slice(-1) if newest else slice(1, None)] = ~repeated
        repeats = np.stack([order[:-1][repeated], order[1:][repeated]])
        return cls(order[counts], repeats, ordered[counts], low, span)

    def find(self, sample: Int64, position: Int64) -> tuple[Int64, Bools]:
        """Return the index in `tokens` of each (sample, position), and whether it exists.

        A negative sample is unknown.
        """
        inside = (sample >= 0) & (position >= self.low) & (position < self.low + self.span)
        if not len(self.keys):
            return np.zeros(len(sample), np.int64), np.zeros(len(sample), bool)
        wanted = np.where(inside, sample * self.span + position - self.low, 0)
        at = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return at, inside & (self.keys[at] == wanted)


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

"""Samples whose tokens lie in several rows: put together by the positions that the rows say.

Context-parallel ranks hold every sample in fragments (of zigzag, each two), and a long sample may
be split. `positions` says of each token where it lies in its sample, `token_offset` of each row
where its first one does; see `schema.PAYLOAD_TENSORS`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from stagescope_service.dumps.joining.column import Allocate, Array, Int64, Piece, bits, piece_of
from stagescope_service.store.tensorfile import WireTensor

PLACES: Final = frozenset({"positions", "token_offset"})

_FILLED: Final = 1
_SURE: Final = 2


class Locations(NamedTuple):
    """Where the tokens of a part's rows lie in their samples.

    Attributes:
        positions: int64 [rows, width].
        sure: bool [rows, width]: tokens that the mask counts.
        there: bool [rows, width]: these, and others that are no padding.
    """

    positions: Int64
    sure: Array
    there: Array

    @property
    def span(self) -> int:
        """One more than the last position."""
        return int(self.positions[self.there].max(initial=-1)) + 1


def locations_of(tensors: Mapping[str, WireTensor], rows: int) -> Locations | None:
    """Return where the tokens of rows lie; None where that is not said, or makes no sense."""
    mask = _dense(tensors, "response_mask", rows)
    if mask is None or mask.values.ndim != 2:
        return None
    counts = mask.values != 0
    inside = np.ones_like(counts)
    if mask.lengths is not None:
        inside = np.arange(mask.width) < mask.lengths[:, None]
    said, offset = _dense(tensors, "positions", rows), _dense(tensors, "token_offset", rows)
    if said is not None and said.values.shape == counts.shape:
        positions = said.values.astype(np.int64)
        if mask.lengths is None:  # what follows a row's tokens does not go on counting
            inside[:, 1:] = np.logical_and.accumulate(np.diff(positions, axis=1) > 0, axis=1)
    elif offset is not None and offset.values.shape == (rows,):
        positions = offset.values.astype(np.int64)[:, None] + np.arange(mask.width)
        if mask.lengths is None:  # nothing says how long a row is beyond its last counted token
            inside = np.logical_or.accumulate(counts[:, ::-1], axis=1)[:, ::-1]
    else:
        return None
    inside &= positions >= 0
    return None if (counts & ~inside).any() else Locations(positions, counts, inside)


def checksum(before: str, tensors: Mapping[str, WireTensor]) -> str:
    """Return a hash of tensors, after what was hashed before: replicas have the same."""
    found = hashlib.blake2b(before.encode(), digest_size=12)
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(np.ascontiguousarray(tensors[name][2]).view(np.uint8).data)
    return found.hexdigest()


class Assembly:
    """One tensor of one pass, from fragments.

    Args:
        tag, shape: dtype tag, and [rows, span, ...] of all samples.
        allocate: where the memory comes from.
    """

    def __init__(
        self, tag: str, shape: tuple[int, ...], dtype: np.dtype[Any], allocate: Allocate
    ) -> None:
        self.tag = tag
        self.values = allocate(shape, dtype)
        self.values[...] = 0
        self._state = np.zeros(shape[:2], np.uint8)
        self.differing = 0
        """Values of tokens that two fragments hold, and not alike."""

    def put(self, rows: Int64, spots: Locations, values: Array) -> None:
        """Write the tokens of a part's rows: those that count over those that do not."""
        for there, state in ((spots.sure, _SURE), (spots.there & ~spots.sure, _FILLED)):
            row, at = np.nonzero(there)
            target, position = rows[row], spots.positions[row, at]
            known = self._state[target, position]
            again = known == _SURE if state == _SURE else known == _FILLED
            here = self.values[target[again], position[again]]
            differ = bits(here) != bits(np.ascontiguousarray(values[row[again], at[again]]))
            self.differing += int(differ.sum())
            free = known < state
            self.values[target[free], position[free]] = values[row[free], at[free]]
            self._state[target[free], position[free]] = state

    def finish(self) -> tuple[Int64, Piece, Int64]:
        """Return the rows that came, their values with their lengths, and those with holes."""
        there = self._state > 0
        rows = np.flatnonzero(there.any(axis=1))
        at = np.arange(there.shape[1]) + 1
        lengths = (there * at).max(axis=1, initial=0)[rows].astype(np.int64)
        holes = rows[there[rows].sum(axis=1) < lengths]
        return rows, Piece(self.tag, self.values[rows], lengths), holes


def _dense(tensors: Mapping[str, WireTensor], name: str, rows: int) -> Piece | None:
    return piece_of(tensors[name], rows, "right") if name in tensors else None

"""The tokens that a summary keeps by name: the worst, the first non-finite and unequal ones."""

from __future__ import annotations

from typing import NamedTuple

from stagescope_service.statistics.cell import Float64, Int64
from stagescope_service.statistics.jit import exact, inlined


class Kept(NamedTuple):
    """The tokens with the K smallest keys."""

    keys: Float64
    """[K, 3], compared from left to right."""
    ids: Int64
    """[K, 2]: token, segment."""
    used: Int64
    """[1], the number of filled rows."""


class At(NamedTuple):
    """The place of the first token of a block."""

    order: float
    """Of its sample."""
    first: int
    """Its index in the batch."""
    position: int
    """The offset from a token's index to its position in its sample."""
    segment: int


@exact
def _sorts_after(kept: Float64, row: int, key: tuple[float, float, float]) -> bool:
    for j in range(3):
        if kept[row, j] != key[j]:
            return bool(kept[row, j] > key[j])
    return False


@exact
def keep_least(kept: Kept, key: tuple[float, float, float], token: int, segment: int) -> None:
    """Keep (key, token, segment) if it is among the K smallest; the largest is kept at 0."""
    keys, ids, used = kept
    size, place = keys.shape[0], 0
    if used[0] < size:
        place = used[0]
        used[0] += 1
    elif not _sorts_after(keys, 0, key):
        return
    keys[place, 0], keys[place, 1], keys[place, 2] = key
    ids[place, 0], ids[place, 1] = token, segment
    if used[0] == size:
        largest = 0
        for i in range(1, size):
            if _sorts_after(keys, i, (keys[largest, 0], keys[largest, 1], keys[largest, 2])):
                largest = i
        for j in range(3):
            keys[0, j], keys[largest, j] = keys[largest, j], keys[0, j]
        for j in range(2):
            ids[0, j], ids[largest, j] = ids[largest, j], ids[0, j]


@exact
def _least_kept(kept: Kept) -> float:
    """Return the |d| below which no token is among the worst."""
    return float(-kept.keys[0, 0]) if kept.used[0] == kept.keys.shape[0] else 0.0


@inlined
def keep_worst(d: Float64, n: int, largest: float, at: At, kept: Kept) -> None:
    """Keep the tokens of a block that are among the worst; `largest` is its largest |d|."""
    bound = _least_kept(kept)
    if largest < bound:
        return
    for k in range(n):
        x = abs(d[k])
        if x >= bound and x > 0.0:
            token = at.first + k
            key = (-x, at.order, float(at.position + token))
            keep_least(kept, key, token, at.segment)
            bound = _least_kept(kept)


@inlined
def keep_first_unequal(d: Float64, n: int, at: At, kept: Kept) -> None:
    """Keep the first token of a block whose d is not 0; later ones of its segment sort after it."""
    for k in range(n):
        if d[k] != 0.0:
            token = at.first + k
            key = (0.0, at.order, float(at.position + token))
            keep_least(kept, key, token, at.segment)
            return

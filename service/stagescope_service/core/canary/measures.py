"""Statistics of two arms: how far the log-probs of the same tokens differ.

Pure: two arms in, numbers out. A token counts if both arms have a finite log-prob of it, after the
same tokens. What does not count is counted, by its reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagescope_wire.canary import Arm

if TYPE_CHECKING:
    from stagescope_service.store.tables import CanarySequence

Float64 = NDArray[np.float64]

_FITTED: Final = 16
"""Fewest tokens of which a slope is decided."""
_BLOCK: Final = 16
"""Tokens in a row that may change together."""
_SLOPE: Final = 0.02
"""Smallest distance of a decided slope from 1."""
_REST: Final = 0.25
"""Most of the sum of d^2 that a decided line leaves."""
_CLIPPED: Final = 3.0
"""Largest |d| in medians of |d| that two versions share."""
_CERTAIN: Final = 5.0
"""Smallest distance of a decided slope from 1, in its standard errors."""


class Measure(NamedTuple):
    """The statistics of two arms.

    Attributes:
        tokens: number of tokens that count.
        unscored: number of tokens that one arm alone scored, or that follow different tokens.
        not_finite: number of tokens with a log-prob that is NaN or infinite in one arm.
        mean: mean |d| over all tokens, in nats; None: no token counts.
        max: largest |d|, in nats; None: no token counts.
        error: standard error of the mean, if tokens were independent; None: fewer than two.
        slope: of the first arm's log-probs on the second's where a line with another slope than 1
            explains the difference, as between two temperatures; else None.
        sequences: of each sequence that both arms have.
    """

    tokens: int
    unscored: int
    not_finite: int
    mean: float | None
    max: float | None
    error: float | None
    slope: float | None
    sequences: tuple[CanarySequence, ...]


class _Aligned(NamedTuple):
    positions: range
    first: Float64
    second: Float64
    unscored: int
    parts_at: int | None


def measure(first: Arm, second: Arm) -> Measure:
    """Compare two arms, sequence by sequence."""
    pairs = [*_pairs(first, second)]
    sequences = tuple(starmap(_sequence, pairs))
    p = np.concatenate([np.empty(0), *(each.first for _, each in pairs)])
    q = np.concatenate([np.empty(0), *(each.second for _, each in pairs)])
    counted = np.isfinite(p) & np.isfinite(q)
    p, q = p[counted], q[counted]
    d = np.abs(p - q)
    return Measure(
        tokens=len(d),
        unscored=sum(each["unscored"] for each in sequences),
        not_finite=sum(each["not_finite"] for each in sequences),
        mean=float(d.mean()) if len(d) else None,
        max=float(d.max()) if len(d) else None,
        error=float(d.std(ddof=1) / math.sqrt(len(d))) if len(d) > 1 else None,
        slope=_slope(p, q),
        sequences=sequences,
    )


def distance(first: Arm, second: Arm) -> float | None:
    """Return the mean |d| of two arms, in nats; None: no token counts."""
    return measure(first, second).mean


class Repeated(NamedTuple):
    """The part of a difference that two versions share.

    Attributes:
        tokens: number of tokens that count.
        correlation: of the two differences, token by token, around 0.
        size: geometric mean of their root mean squares, in nats.
    """

    tokens: int
    correlation: float
    size: float

    def nats(self, correlation: float) -> float:
        """Return the root mean square, in nats, of a shared part with this correlation."""
        return self.size * math.sqrt(max(0.0, correlation))


def repeated(now: tuple[Arm, Arm], then: tuple[Arm, Arm]) -> Repeated | None:
    """Compare the differences of two sides in two versions, on the tokens that all have.

    Rounding moves other tokens in each version, wrong weights the same ones. A token that is far
    off counts as three medians, since a few of them are chance.

    Returns:
        None where no token counts, or a side has no difference.
    """
    first, second, first_then, second_then = _shared(*now, *then)
    both = [_clipped(first - second), _clipped(first_then - second_then)]
    size = math.sqrt(math.prod(float(each @ each) / len(each) for each in both if len(each)))
    if not len(first) or not size > 0.0:
        return None
    product = float(both[0] @ both[1]) / len(both[0])
    return Repeated(len(both[0]), product / size, math.sqrt(size))


class Change(NamedTuple):
    """The log-probs of one side in a version, and in the version before."""

    after: Arm
    before: Arm


def follows(engine: Change, newest: Change, earlier: Change) -> float:
    """Return how surely an engine's change is the trainer's earlier change, not its newest one.

    The rounding of both sides is unrelated, so that it adds nothing on average.

    Args:
        engine: of the engine.
        newest: of the trainer, between the same two versions.
        earlier: of the trainer, between two versions before.

    Returns:
        The mean over tokens of engine * (earlier - newest), in its standard errors; each change
        counts as at most three medians of it. The errors are those of 16 tokens in a row: one that
        goes to another expert changes those after it. 0 where no token tells.
    """
    arms = _shared(*engine, *newest, *earlier)
    own, now, then = (_clipped(arms[at] - arms[at + 1]) for at in (0, 2, 4))
    product = own * (then - now)
    blocks = len(product) // _BLOCK
    if blocks < _FITTED:
        return 0.0
    means = product[: blocks * _BLOCK].reshape(blocks, _BLOCK).mean(axis=1)
    error = float(means.std(ddof=1)) / math.sqrt(blocks)
    return float(means.mean()) / error if error > 0.0 else 0.0


def _shared(*arms: Arm) -> list[Float64]:
    """Return the log-probs of each arm, of the tokens of which all have a finite one."""
    places = [{row: at for at, row in enumerate(arm.rows)} for arm in arms]
    found: list[list[Sequence[float]]] = [[] for _ in arms]
    for row in arms[0].rows:
        if all(row in place for place in places):
            of_row = [arm.log_probs[place[row]] for arm, place in zip(arms, places, strict=True)]
            size = min(map(len, of_row))
            for target, each in zip(found, of_row, strict=True):
                target.append(each[len(each) - size :])
    values = np.array([[score for each in of_arm for score in each] for of_arm in found])
    return [*values[:, np.isfinite(values).all(axis=0)]]


def _clipped(d: Float64) -> Float64:
    if not len(d):
        return d
    most = _CLIPPED * float(np.median(np.abs(d)))
    return np.clip(d, -most, most)


def _pairs(first: Arm, second: Arm) -> Iterator[tuple[tuple[int, ...], _Aligned]]:
    """Yield each row of the first arm, with its partner's log-probs of the tokens they share.

    The partner has the same tokens; where no row has, it is the row at the same place.
    """
    place = {row: at for at, row in enumerate(second.rows)}
    for at, (row, p) in enumerate(zip(first.rows, first.log_probs, strict=True)):
        has_same_place = at < len(second.rows)
        partner = at if has_same_place and second.rows[at] == row else place.get(row, at)
        if partner < len(second.rows):
            yield row, _aligned(row, p, second.rows[partner], second.log_probs[partner])


def _aligned(
    row: Sequence[int], p: Sequence[float], other: Sequence[int], q: Sequence[float]
) -> _Aligned:
    shared = next((at for at, (a, b) in enumerate(zip(row, other, strict=False)) if a != b), None)
    end = min(len(row), len(other)) if shared is None else shared
    from_p, from_q = len(row) - len(p), len(other) - len(q)
    begin = min(max(from_p, from_q), end)
    return _Aligned(
        range(begin, end),
        np.array(p[begin - from_p : end - from_p] if begin < end else (), np.float64),
        np.array(q[begin - from_q : end - from_q] if begin < end else (), np.float64),
        len(p) + len(q) - 2 * (end - begin),
        None if len(row) == len(other) == end else end,
    )


def _sequence(row: Sequence[int], pair: _Aligned) -> CanarySequence:
    counted = np.isfinite(pair.first) & np.isfinite(pair.second)
    d = np.full(len(counted), -1.0)
    d[counted] = np.abs(pair.first[counted] - pair.second[counted])
    tokens = int(counted.sum())
    worst = int(d.argmax()) if tokens else None
    return {
        "tokens": tokens,
        "unscored": pair.unscored,
        "not_finite": len(counted) - tokens,
        "mean": float(d[counted].mean()) if tokens else None,
        "max": None if worst is None else float(d[worst]),
        "position": None if worst is None else pair.positions[worst],
        "token_id": None if worst is None else row[pair.positions[worst]],
        "first": None if worst is None else float(pair.first[worst]),
        "second": None if worst is None else float(pair.second[worst]),
        "parts_at": pair.parts_at,
    }


def _slope(p: Float64, q: Float64) -> float | None:
    """Return the least-squares slope of p on q where a line explains the difference, else None.

    With scaled logits z / T the log-probs are z / T - logsumexp(z / T): about a line of slope 1 / T
    in the log-probs of z.
    """
    if len(p) < _FITTED:
        return None
    x, y = q - q.mean(), p - p.mean()
    spread, total = float(x @ x), float((p - q) @ (p - q))
    if not spread > 0.0 or not total > 0.0:
        return None
    slope = float(x @ y) / spread
    rest = float(((y - slope * x) ** 2).sum())
    error = math.sqrt(rest / (len(p) - 2) / spread)
    if abs(slope - 1.0) < max(_SLOPE, _CERTAIN * error) or rest > _REST * total:
        return None
    return slope

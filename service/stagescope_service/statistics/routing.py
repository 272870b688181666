"""Routing: whether engine and trainer chose the same experts, as mergeable counts.

The probe counts routes where they are (`stagescope_workers.routing`). Here its counts are checked,
and merged over parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from stagescope_service.statistics.cell import Int64
from stagescope_wire.errors import InvalidTensor
from stagescope_wire.tensorfile import WireTensor
from stagescope_wire.tensors import (
    NO_ROLLOUT_ROUTE,
    NO_ROUTE,
    NO_TRAINER_ROUTE,
    ROUTING_COLUMNS,
    ROUTING_COUNT_COLUMNS,
    ROUTING_COUNTS,
    ROUTING_FLIPS,
    ROUTING_SAME,
    ROUTING_WORST,
    ROUTING_WORST_AT,
)

Int16 = npt.NDArray[np.int16]

MAX_LAYERS: Final = 1024
_MAX_SLOTS: Final = 256
_MAX_ROUNDS: Final = 4096
_MAX_WORST: Final = 64
TOKEN_COLUMNS: Final = (
    "round", "masked", "compared", "hit", "no_rollout", "no_trainer", "no_route",
)  # fmt: skip
"""Columns of `Routing.tokens`: tokens under the mask, with both routes, those with another expert
in a layer, and those that lack a route of one side or of both."""


@dataclasses.dataclass(frozen=True)
class TokenRoutes:
    """What a payload says of its routes.

    Attributes:
        flips: int16 [tokens], see `ROUTING_FLIPS`.
        counts: int64 [n, len(ROUTING_COUNT_COLUMNS)], by row, layer and round.
        same: int64 [layers, layers].
        worst: int16 [worst, 2, layers, K], -1 where there is none.
        worst_at: int64 [worst], index of the token in the payload.
    """

    flips: Int16
    counts: Int64
    same: Int64
    worst: Int16
    worst_at: Int64

    @classmethod
    def of_tensors(
        cls, tensors: Mapping[str, WireTensor], tokens: int, rows: int
    ) -> TokenRoutes | None:
        """Read the counts of a payload of `rows` rows with `tokens` tokens; None: it has none.

        Raises:
            InvalidTensor: they do not fit each other.
        """
        if ROUTING_FLIPS not in tensors or ROUTING_COUNTS not in tensors:
            return None
        flips = _values(tensors, ROUTING_FLIPS, np.int16, None)
        sent = _values(tensors, ROUTING_COUNTS, np.int32, len(ROUTING_COUNT_COLUMNS))
        counts = sent.astype(np.int64)
        same = _values(tensors, ROUTING_SAME, np.int64, None)
        layers = int(counts[:, 1].max()) + 1 if len(counts) else 0
        if counts.size and (counts.min() < 0 or layers > MAX_LAYERS):
            raise _refused(ROUTING_COUNTS, "counts from 0, of layers from 0")
        if counts.size and int(counts[:, 0].max()) >= rows:
            raise _refused(ROUTING_COUNTS, f"counts of rows below {rows}")
        if counts.size and int(counts[:, 2].max()) >= _MAX_ROUNDS:
            raise _refused(ROUTING_COUNTS, f"rounds below {_MAX_ROUNDS}")
        if flips.size != tokens or (flips.size and not _in(flips, NO_ROUTE, layers)):
            raise _refused(ROUTING_FLIPS, f"numbers of layers, up to {layers}, for {tokens} tokens")
        if same.size != layers * layers or (same.size and same.min() < 0):
            raise _refused(ROUTING_SAME, f"counts of [{layers}, {layers}]")
        worst, at = _worst(tensors, layers, tokens)
        return cls(flips.reshape(-1), counts, same.reshape(layers, layers), worst, at)

    def counted(self, kept: Int64, sent: Int64) -> tuple[Int64, Int64]:
        """Return the counts by layer and round, and `same`, of the tokens that count here.

        Rows that were counted together and count in part, and `same`, are taken in proportion.

        Args:
            kept: int64 [rows], model tokens of each row of the payload that count here.
            sent: int64 [rows], all model tokens of it.
        """
        first, at = np.unique(self.counts[:, 0], return_inverse=True)
        if np.array_equal(kept, sent) or not len(first):
            return _added(self.counts[:, 1:], 2), self.same
        share = np.add.reduceat(kept, first) / np.maximum(np.add.reduceat(sent, first), 1)
        share = share[at.reshape(-1)]
        counts = self.counts[share > 0.0, 1:]
        counts[:, 2:] = np.rint(counts[:, 2:] * share[share > 0.0, None])
        column = ROUTING_COLUMNS.index("tokens")
        before, after = (
            np.bincount(each[:, 0], each[:, column], len(self.same))
            for each in (self.counts[:, 1:], counts)
        )
        same = np.rint(self.same * (after / np.maximum(before, 1))[:, None]).astype(np.int64)
        return _added(counts, 2), same


def _worst(tensors: Mapping[str, WireTensor], layers: int, tokens: int) -> tuple[Int16, Int64]:
    if ROUTING_WORST not in tensors or ROUTING_WORST_AT not in tensors:
        return np.empty((0, 2, layers, 0), np.int16), np.empty(0, np.int64)
    at = _values(tensors, ROUTING_WORST_AT, np.int64, None).reshape(-1)
    shape = tensors[ROUTING_WORST][1]
    fits = len(shape) == 4 and tuple(shape[:3]) == (len(at), 2, layers) and shape[3] <= _MAX_SLOTS
    if not fits or len(at) > _MAX_WORST or (at.size and not _in(at, 0, tokens - 1)):
        raise _refused(ROUTING_WORST, f"[tokens, 2, {layers}, K] of up to {_MAX_WORST} tokens")
    return _values(tensors, ROUTING_WORST, np.int16, None).reshape(shape), at


def _in(values: npt.NDArray[np.int16] | Int64, least: int, most: int) -> bool:
    return int(values.min()) >= least and int(values.max()) <= most


Scalar = TypeVar("Scalar", np.int16, np.int32, np.int64)


def _values(
    tensors: Mapping[str, WireTensor], name: str, kind: type[Scalar], width: int | None
) -> npt.NDArray[Scalar]:
    if name not in tensors:
        raise InvalidTensor(f"{name} is missing", expected=f"beside {ROUTING_FLIPS}")
    dtype = np.dtype(kind)
    tag, shape, buffer, _ = tensors[name]
    flat: npt.NDArray[Scalar] = np.ascontiguousarray(buffer).reshape(-1)
    if buffer.dtype == np.uint8 and buffer.nbytes % dtype.itemsize == 0:
        flat = np.frombuffer(flat.tobytes(), dtype)
    if tag != dtype.name or flat.dtype != dtype or flat.size != math.prod(shape):
        raise _refused(name, dtype.name)
    if width is None:
        return flat
    if len(shape) != 2 or shape[1] != width:
        raise _refused(name, f"[n, {width}]")
    return flat.reshape(shape)


def _refused(name: str, expected: str) -> InvalidTensor:
    return InvalidTensor(f"{name} does not fit", expected=expected)


@dataclasses.dataclass(frozen=True)
class WorstRoutes:
    """The routes of worst tokens: `where` int64 [n, 2], sequence in the summary and position;
    `routes` int16 [n, 2, layers, K] of rollout and trainer, -1 where there is none."""

    where: Int64
    routes: Int16

    @classmethod
    def none(cls) -> WorstRoutes:
        """Return the routes of no token."""
        return cls(np.empty((0, 2), np.int64), np.empty((0, 2, 0, 0), np.int16))

    @classmethod
    def merge(cls, parts: Sequence[WorstRoutes], starts: Sequence[int]) -> WorstRoutes:
        """Join the routes of summaries whose sequences begin at these indexes.

        Of routes of several shapes those of the first remain: they are of one model.
        """
        moved = [
            cls(part.where + np.array([start, 0]), part.routes)
            for part, start in zip(parts, starts, strict=True)
            if len(part.where)
        ]
        if not moved:
            return cls.none()
        shape = moved[0].routes.shape[1:]
        moved = [part for part in moved if part.routes.shape[1:] == shape]
        return cls(
            np.concatenate([part.where for part in moved]),
            np.concatenate([part.routes for part in moved]),
        )

    def only(self, sequence: Int64, position: Int64) -> WorstRoutes:
        """Return the routes of these tokens alone."""
        wanted = set(zip(sequence.tolist(), position.tolist(), strict=True))
        chosen = np.array([tuple(pair) in wanted for pair in self.where.tolist()], bool)
        return self if chosen.all() else WorstRoutes(self.where[chosen], self.routes[chosen])

    def of(self, sequence: int, position: int) -> Int16 | None:
        """Return int16 [2, layers, K] of a token; None: its routes are not kept."""
        found = np.flatnonzero((self.where == (sequence, position)).all(axis=1))
        return self.routes[found[0]] if len(found) else None


@dataclasses.dataclass(frozen=True)
class Routing:
    """The agreement of routes over the tokens of one or more payloads.

    Attributes:
        counts: int64 [n, len(ROUTING_COLUMNS)], ascending by layer and round.
        tokens: int64 [rounds, len(TOKEN_COLUMNS)], ascending by round.
        same: int64 [layers, layers], tokens whose experts are equal in the rollout's layer (row)
            and the trainer's layer (column).
        worst: routes of worst tokens.
    """

    counts: Int64
    tokens: Int64
    same: Int64
    worst: WorstRoutes

    @classmethod
    def of_payload(
        cls,
        routes: TokenRoutes,
        at: Int64,
        rounds: Int64,
        rows: tuple[Int64, Int64],
        worst: WorstRoutes,
    ) -> Routing:
        """Count a payload's tokens.

        Args:
            routes: of the payload.
            at: int64, the indexes of the tokens that count.
            rounds: int64, the round of each of these.
            rows: of `TokenRoutes.counted`.
            worst: routes of its worst tokens.
        """
        flips = routes.flips[at]
        keys, slots = np.unique(rounds, return_inverse=True)
        columns = [
            np.ones(len(flips), bool), flips >= 0, flips > 0, flips == NO_ROLLOUT_ROUTE,
            flips == NO_TRAINER_ROUTE, flips == NO_ROUTE,
        ]  # fmt: skip
        sums = [
            np.bincount(slots.reshape(-1), each, minlength=len(keys)).astype(np.int64)
            for each in columns
        ]
        tokens = np.stack([keys, *sums], axis=1).astype(np.int64)
        counts, same = routes.counted(*rows)
        return cls(counts, tokens, same, worst)

    @classmethod
    def merge(cls, parts: Sequence[Routing], worst: WorstRoutes) -> Routing | None:
        """Add up the counts of disjoint tokens; None: no part has routes."""
        if not parts:
            return None
        layers = max(len(part.same) for part in parts)
        same = np.zeros((layers, layers), np.int64)
        for part in parts:
            same[: len(part.same), : len(part.same)] += part.same
        return cls(
            _added(np.concatenate([part.counts for part in parts]), 2),
            _added(np.concatenate([part.tokens for part in parts]), 1),
            same,
            worst,
        )

    @property
    def layers(self) -> int:
        """Number of layers with routes."""
        return len(self.same)

    def total(self, column: str) -> int:
        """Return the sum of a column of `TOKEN_COLUMNS`."""
        return int(self.tokens[:, TOKEN_COLUMNS.index(column)].sum())

    def by_layer(self) -> dict[str, Int64]:
        """Return column of `ROUTING_COLUMNS` -> its sums [layers]."""
        sums = np.zeros((self.layers, len(ROUTING_COLUMNS)), np.int64)
        np.add.at(sums, self.counts[:, 0], self.counts)
        return {name: sums[:, at] for at, name in enumerate(ROUTING_COLUMNS)}


def _added(rows: Int64, keys: int) -> Int64:
    """Add up rows with equal keys, which are the first columns."""
    unique, where = np.unique(rows[:, :keys], axis=0, return_inverse=True)
    sums = np.zeros((len(unique), rows.shape[1] - keys), np.int64)
    np.add.at(sums, where.reshape(-1), rows[:, keys:])
    return np.concatenate([unique, sums], axis=1)

"""The experts that engine and trainer chose, counted where they are: routes are too many to send.

48 layers with 8 experts are 384 numbers a token. What leaves the process is `ROUTING_TENSORS`:
counts by row, layer and round, one number for each token, and the routes of the worst tokens.

Row t of routes has the experts of token t, as an input. The log-prob of a token depends on the pass
before: it is compared by the routes of the token before it. Routes are of prompt and response, as
wide as both. The last token, which no pass reads, may be missing or a row of zeros. Routes as wide
as the mask are of the response alone, so its first token has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_wire.errors import InvalidTensor
from stagescope_wire.tensorfile import WireTensor
from stagescope_wire.tensors import (
    MAX_EXPERTS,
    NO_ROLLOUT_ROUTE,
    NO_ROUTE,
    NO_TRAINER_ROUTE,
    PAIRS,
    ROLLOUT_ROUTES,
    ROUTING_COLUMNS,
    ROUTING_COUNT_COLUMNS,
    ROUTING_COUNTS,
    ROUTING_FLIPS,
    ROUTING_SAME,
    ROUTING_WORST,
    ROUTING_WORST_AT,
    STREAM_TENSORS,
    TRAINER_ROUTES,
)
from stagescope_workers.payload import Spec

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

WORST: Final = 16
"""Tokens of a payload that keep their routes."""
_CHUNK: Final = 1 << 21
"""Numbers of one side that are looked at at once: their arrays stay below some ten MB."""
_MAX_COUNTED: Final = 1 << 18
"""Rows of `ROUTING_COUNTS`, 14 MB: where each row of a payload would need more, several are one."""
_INTEGERS: Final = ("int64", "int32", "int16", "int8", "uint8")
_AT: Final = {name: at for at, name in enumerate(ROUTING_COLUMNS)}
_SIDES: Final = (ROLLOUT_ROUTES, TRAINER_ROUTES)
_MISSING: Final = (NO_ROLLOUT_ROUTE, NO_TRAINER_ROUTE)


def names_in(names: Mapping[str, object]) -> tuple[str | None, str | None]:
    """Return the names of the rollout's and of the trainer's routes; None: not recorded."""
    first = [next((name for name in side if name in names), None) for side in _SIDES]
    return first[0], first[1]


def problems(specs: Mapping[str, Spec]) -> Iterator[InvalidTensor]:
    """Yield what keeps routes from being counted, by shapes and dtypes alone."""
    found = [name for name in names_in(specs) if name is not None]
    forms = {name: (specs[name].tag, [*specs[name].shape]) for name in found}
    for name, (tag, shape) in forms.items():
        if tag not in _INTEGERS:
            yield InvalidTensor(f"{name} is {tag}", expected=f"one of {', '.join(_INTEGERS)}")
        elif len(shape) not in (3, 4):
            yield InvalidTensor(
                f"{name} has shape {shape}",
                expected="[rows, tokens, layers, K], or a list of rows [tokens, layers, K]",
            )
    if len({tuple(shape[-2:]) for _, shape in forms.values()}) > 1:
        listed = " and ".join(f"{name} {shape}" for name, (_, shape) in forms.items())
        yield InvalidTensor(f"routes are {listed}", expected="equally many layers and experts")
    if found and "response_mask" not in specs:
        yield InvalidTensor(
            f"response_mask is missing beside {found[0]}: no routes are compared",
            expected="response_mask in the same stage: 1 = model token",
        )


def count(tensors: Mapping[str, WireTensor]) -> dict[str, WireTensor]:
    """Return `ROUTING_TENSORS` of a payload's routes, {} without routes or a mask.

    Not for the training thread.

    Raises:
        InvalidTensor: shapes, dtypes or rows do not fit.
    """
    names = names_in(tensors)
    if names == (None, None) or "response_mask" not in tensors:
        return {}
    specs = {n: Spec(t[0], t[1], None) for n, t in tensors.items()}
    for error in problems(specs):
        raise error
    tokens = _Tokens.of(tensors)
    recorded = [None if n is None else _Recorded.of(n, tensors, tokens.rows) for n in names]
    sides = _aligned(recorded, tensors, tokens)
    counted = _Counts.of(tokens, sides)
    flips = np.full(tokens.size, NO_ROUTE, np.int16)
    flips[tokens.at] = counted.flips
    _, shape, _, offsets = tensors["response_mask"]
    found: dict[str, WireTensor] = {
        ROUTING_FLIPS: ("int16", shape, flips.reshape(shape), offsets),
        ROUTING_COUNTS: _wire(counted.table()),
        ROUTING_SAME: _wire(counted.same),
    }
    at = _worst(tensors, tokens)
    if at.size:
        routes = np.stack([_rows(side, at, counted.shape) for side in sides], axis=1)
        found[ROUTING_WORST] = _wire(routes)
        found[ROUTING_WORST_AT] = _wire(tokens.at[at])
    return found


def _wire(array: Array) -> WireTensor:
    return array.dtype.name, array.shape, np.ascontiguousarray(array), None


def _rows(side: _Routes | None, at: Int64, shape: tuple[int, int]) -> npt.NDArray[np.int16]:
    """Return the routes of model tokens, -1 where there are none."""
    found = np.full((len(at), *shape), -1, np.int16)
    if side is not None:
        there = side.index[at] >= 0
        found[there] = side.values[side.index[at[there]]]
    return found


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """The model's tokens of a payload, in order.

    Attributes:
        at: their indexes among all tokens.
        row, column: where they are.
        round: the round of each.
        offsets: [rows + 1], where the mask's rows begin.
    """

    at: Int64
    row: Int64
    column: Int64
    round: Int64
    offsets: Int64

    @property
    def size(self) -> int:
        """Number of all tokens."""
        return int(self.offsets[-1])

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    @classmethod
    def of(cls, tensors: Mapping[str, WireTensor]) -> _Tokens:
        """Read the mask, and the rounds."""
        tag, shape, mask, rows = tensors["response_mask"]
        offsets = _offsets("response_mask", shape, rows, tensors, columns=2)
        # A bfloat16 arrives as its bits: only its zeros are 0, or -0.
        on = mask.reshape(-1) != 0 if tag != "bfloat16" else (mask.reshape(-1) & 0x7FFF) != 0
        at = np.flatnonzero(on)
        row = np.searchsorted(offsets, at, "right") - 1
        begins = np.append(True, (np.diff(at) != 1) | (np.diff(row) != 0))[: len(at)]
        number = np.cumsum(begins) - 1
        first = np.searchsorted(row, np.arange(len(offsets) - 1))
        before = np.append(number, 0)[np.minimum(first, len(at))]
        found = number - before[row]
        if (ids := tensors.get("round_ids")) is not None and ids[2].size == on.size:
            found = ids[2].reshape(-1)[at].astype(np.int64)
        elif (of_row := tensors.get("round_offset")) is not None:
            found = found + of_row[2].reshape(-1).astype(np.int64)[row]
        return cls(at, row, at - offsets[row], found, offsets)


def _offsets(
    name: str,
    shape: tuple[int, ...],
    rows: Array | None,
    tensors: Mapping[str, WireTensor],
    *,
    columns: int,
) -> Int64:
    """Return where rows begin in a tensor whose padded form has rows and tokens first."""
    size = int(np.prod(shape[: len(shape) - columns + 2], dtype=np.int64))
    packed = tensors.get("cu_seqlens")
    if rows is not None:
        offsets = np.asarray(rows, np.int64)
    elif packed is not None and (len(shape) == columns - 1 or shape[0] == 1):
        offsets = packed[2].reshape(-1).astype(np.int64)
    elif len(shape) == columns:
        return np.arange(shape[0] + 1, dtype=np.int64) * shape[1]
    else:
        raise InvalidTensor(f"{name} has shape {shape}", expected="rows, or cu_seqlens")
    size = shape[0] if len(shape) == columns - 1 else shape[0] * shape[1]
    if not len(offsets) or offsets[-1] != size or (np.diff(offsets) < 0).any():
        raise InvalidTensor(
            f"{name} has {size} tokens", expected="rows that end there, as cu_seqlens says"
        )
    return offsets


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """The routes of one side as recorded: values [n, layers, K], and where rows begin."""

    values: Array
    offsets: Int64

    @classmethod
    def of(cls, name: str, tensors: Mapping[str, WireTensor], rows: int) -> _Recorded:
        """Read the tensor of one side."""
        _, shape, values, own = tensors[name]
        offsets = _offsets(name, shape, own, tensors, columns=4)
        if len(offsets) - 1 != rows:
            raise InvalidTensor(
                f"{name} has {len(offsets) - 1} rows", expected=f"as response_mask: {rows}"
            )
        return cls(values.reshape(-1, *shape[-2:]), offsets)

    @property
    def lengths(self) -> Int64:
        """Number of routes of each row."""
        return np.diff(self.offsets).astype(np.int64)

    def is_filled(self, rows: Bools) -> bool:
        """Return whether these rows end with a route of zeros: of the last token, or padding."""
        last = self.offsets[1:][rows] - 1
        return bool(last.size) and not self.values[last].any()


@dataclasses.dataclass(frozen=True)
class _Routes:
    """The routes of one side: values [n, layers, K], and the index of each model token, or -1."""

    values: Array
    index: Int64


def _aligned(
    sides: list[_Recorded | None], tensors: Mapping[str, WireTensor], tokens: _Tokens
) -> list[_Routes | None]:
    """Find the pass of each model token among the routes of both sides."""
    width = np.diff(tokens.offsets).astype(np.int64)
    recorded = [side for side in sides if side is not None]
    length = np.max([side.lengths for side in recorded], axis=0)
    whole = _lengths(tensors, tokens)
    if whole is None:
        # The last token has no pass of its own: a row of zeros stands there, or nothing. Where one
        # side has a row more than the other, it has one for each token.
        rows = length > width
        differ = any((side.lengths != length)[rows].any() for side in recorded)
        is_whole = differ or any(side.is_filled(rows) for side in recorded)
        whole = length + (0 if is_whole else 1)
    begin = whole - width - 1
    return [None if side is None else _index(side, begin, width, tokens) for side in sides]


def _index(side: _Recorded, begin: Int64, width: Int64, tokens: _Tokens) -> _Routes:
    # Routes as wide as the mask, or without its last token, have no pass of the prompt.
    begin = np.where(side.lengths <= width, -1, begin)
    column = tokens.column + begin[tokens.row]
    inside = (column >= 0) & (column < side.lengths[tokens.row])
    return _Routes(side.values, np.where(inside, column + side.offsets[:-1][tokens.row], -1))


def _lengths(tensors: Mapping[str, WireTensor], tokens: _Tokens) -> Int64 | None:
    """Return the number of tokens of each row with its prompt, padding included, if known."""
    for name in ("input_ids", "tokens"):
        if name in tensors and len(found := _widths(tensors[name])) == tokens.rows:
            return found
    if "prompts" in tensors and len(found := _widths(tensors["prompts"])) == tokens.rows:
        return found + np.diff(tokens.offsets).astype(np.int64)
    return None


def _widths(tensor: WireTensor) -> Int64:
    _, shape, _, rows = tensor
    if rows is not None:
        return np.diff(np.asarray(rows, np.int64)).astype(np.int64)
    return np.full(shape[0], shape[1], np.int64) if len(shape) == 2 else np.empty(0, np.int64)


def _worst(tensors: Mapping[str, WireTensor], tokens: _Tokens) -> Int64:
    """Return the model tokens with the largest finite |d|, the largest first."""
    for pair in PAIRS:
        names = [STREAM_TENSORS[stream] for stream in pair]
        if pair[1] != "rollout" or not all(name in tensors for name in names):
            continue
        p, q = (_floats(tensors[name]) for name in names)
        if p.size != tokens.size or q.size != tokens.size:
            break
        with np.errstate(invalid="ignore"):
            size = np.abs(p[tokens.at].astype(np.float64) - q[tokens.at])
        size[~np.isfinite(size)] = -1.0
        most = min(WORST, len(size))
        chosen = np.argpartition(-size, most - 1)[:most] if most else np.empty(0, np.int64)
        chosen = chosen[size[chosen] > 0.0]
        return chosen[np.lexsort((chosen, -size[chosen]))]
    return np.empty(0, np.int64)


def _floats(tensor: WireTensor) -> Array:
    tag, _, values, _ = tensor
    values = values.reshape(-1)
    return (values.astype(np.uint32) << 16).view(np.float32) if tag == "bfloat16" else values


class _Chunk(NamedTuple):
    """One side of some tokens: their keys, equal for equal sets of experts, [tokens, layers]."""

    values: Array
    keys: Keys
    has_route: Bools
    """[tokens]."""
    is_set: Bools
    """[tokens, layers]: whether experts were chosen in the layer."""

    def last_and(self, next_one: _Chunk) -> _Chunk:
        """Return the last token of this chunk, and all of the next one."""
        return _Chunk(
            np.concatenate([self.values[-1:], next_one.values]),
            np.concatenate([self.keys[-1:], next_one.keys]),
            np.concatenate([self.has_route[-1:], next_one.has_route]),
            np.concatenate([self.is_set[-1:], next_one.is_set]),
        )


class _Counts:
    """What is counted of both sides; `flips` of the model tokens."""

    def __init__(self, tokens: _Tokens, shape: tuple[int, int]) -> None:
        self.shape = layers, _ = shape
        most = max(_MAX_COUNTED // max(layers, 1), 1)
        joined = 1
        while True:
            places = np.stack([tokens.row // joined, tokens.round], axis=1)
            self._places, slot = np.unique(places, axis=0, return_inverse=True)
            if len(self._places) <= most or joined >= tokens.rows:
                break
            joined *= -(-len(self._places) // most)
        self._places[:, 0] *= joined
        self._slot = slot.reshape(-1)
        self._sums = np.zeros((len(self._places), layers, len(ROUTING_COLUMNS)), np.int32)
        self.same = np.zeros((layers, layers), np.int64)
        self.flips = np.full(len(tokens.at), NO_ROUTE, np.int16)

    @classmethod
    def of(cls, tokens: _Tokens, sides: list[_Routes | None]) -> _Counts:
        """Count the routes of both sides, in pieces."""
        known = next(side for side in sides if side is not None)
        shape = int(known.values.shape[1]), int(known.values.shape[2])
        counts = cls(tokens, shape)
        table = np.random.default_rng(36).integers(1 << 63, size=MAX_EXPERTS, dtype=np.uint64)
        table[0] |= np.uint64(1)
        step = max(_CHUNK // max(shape[0] * shape[1], 1), 1)
        before: tuple[_Chunk, _Chunk] | None = None
        for start in range(0, len(tokens.at), step):
            part = slice(start, start + step)
            both = [_chunk(side, part, tokens, shape, table) for side in sides]
            counts._add(tokens, part, both[0], both[1])
            counts._add_neighbours(tokens, part, both[0], both[1], before)
            before = both[0], both[1]
        return counts

    def _add(self, tokens: _Tokens, part: slice, rollout: _Chunk, trainer: _Chunk) -> None:
        slots, (_, most) = self._slot[part], self.shape
        both = rollout.is_set & trainer.is_set
        same = both & (rollout.keys == trainer.keys)
        ordered = same & (rollout.values == trainer.values).all(axis=2)
        equal = np.where(same, most, 0)
        differ = np.nonzero(both & ~same)
        if len(differ[0]):
            a, b = rollout.values[differ], trainer.values[differ]
            found = np.zeros(len(a), np.int64)
            for k in range(most):
                found += (a[:, k, None] == b).any(axis=1)
            equal[differ] = found
        columns = {
            "tokens": both, "same": same, "ordered": ordered, "slots": equal,
            "choices": both * np.int64(most),
            "rollout_unset": ~rollout.is_set & rollout.has_route[:, None],
            "trainer_unset": ~trainer.is_set & trainer.has_route[:, None],
        }  # fmt: skip
        for name, values in columns.items():
            self._sum(name, values, slots)
        flips = (both & ~same).sum(axis=1).astype(np.int16)
        compared = both.any(axis=1)
        # A row of zeros, where no layer has a choice, is no route.
        lacks = [~(each.has_route & each.is_set.any(axis=1)) for each in (rollout, trainer)]
        codes = np.where(lacks[0] & lacks[1], NO_ROUTE, np.where(lacks[0], *_MISSING))
        self.flips[part] = np.where(compared, flips, codes)
        self._add_layers(rollout.keys[compared], trainer.keys[compared], both[compared])

    def _sum(self, name: str, values: Array, slots: Int64) -> None:
        if not len(slots):
            return
        sums = self._sums[:, :, _AT[name]]
        if (np.diff(slots) < 0).any():
            order = np.argsort(slots, kind="stable")
            values, slots = values[order], slots[order]
        starts = np.flatnonzero(np.append(True, np.diff(slots) != 0))
        if len(starts) == 1:
            sums[slots[0]] += values.sum(axis=0, dtype=np.int32)
        else:
            sums[slots[starts]] += np.add.reduceat(values, starts, axis=0, dtype=np.int32)

    def _add_layers(self, rollout: Keys, trainer: Keys, both: Bools) -> None:
        """Count equal sets for each pair of layers, by 16 bits of their keys."""
        a, b = (
            np.ascontiguousarray((keys >> np.uint64(47)).astype(np.uint16).T)
            for keys in (rollout, trainer)
        )
        valid = np.ascontiguousarray(both.T)
        for i in range(len(a)):
            for j in range(len(b)):
                self.same[i, j] += np.count_nonzero((a[i] == b[j]) & valid[i] & valid[j])

    def _add_neighbours(
        self,
        tokens: _Tokens,
        part: slice,
        rollout: _Chunk,
        trainer: _Chunk,
        before: tuple[_Chunk, _Chunk] | None,
    ) -> None:
        """Count the tokens whose rollout experts the trainer chose one token before, or after."""
        begin = part.start
        if before is not None:
            rollout, trainer = (
                a.last_and(b) for a, b in zip(before, (rollout, trainer), strict=True)
            )
            begin -= 1
        at = slice(begin, part.stop)
        follows = (np.diff(tokens.at[at]) == 1) & (np.diff(tokens.row[at]) == 0)
        follows &= np.diff(tokens.round[at]) == 0
        pairs = follows[:, None] & rollout.is_set[:-1] & trainer.is_set[:-1]
        pairs &= rollout.is_set[1:] & trainer.is_set[1:]
        slots = self._slot[at][1:]
        self._sum("pairs", pairs, slots)
        self._sum("earlier", pairs & (rollout.keys[1:] == trainer.keys[:-1]), slots)
        self._sum("later", pairs & (rollout.keys[:-1] == trainer.keys[1:]), slots)

    def table(self) -> npt.NDArray[np.int32]:
        """Return the rows of `ROUTING_COUNT_COLUMNS`, by row, round and layer."""
        self._sums[:, :, _AT["layer"]] = np.arange(self.shape[0])
        self._sums[:, :, _AT["round"]] = self._places[:, 1, None]
        rows = np.broadcast_to(self._places[:, 0, None, None], (*self._sums.shape[:2], 1))
        found = np.concatenate([rows, self._sums], axis=2).astype(np.int32)
        return found.reshape(-1, len(ROUTING_COUNT_COLUMNS))


def _chunk(
    side: _Routes | None,
    part: slice,
    tokens: _Tokens,
    shape: tuple[int, int],
    table: Keys,
) -> _Chunk:
    size = len(tokens.at[part])
    if side is None:
        values = np.zeros((size, *shape), np.int16)
        unset = np.zeros((size, shape[0]), bool)
        return _Chunk(values, np.zeros((size, shape[0]), np.uint64), np.zeros(size, bool), unset)
    index = side.index[part]
    if not len(side.values):
        return _chunk(None, part, tokens, shape, table)
    values = side.values[np.maximum(index, 0)]
    has_route = index >= 0
    if values.size and int(values.max()) >= MAX_EXPERTS:
        raise InvalidTensor(
            f"a route names expert {int(values.max())}", expected=f"experts below {MAX_EXPERTS}"
        )
    known = values >= 0
    is_set = known.all(axis=2) & has_route[:, None]
    if shape[1] > 1:  # no expert is chosen twice: all 0 or 255 (-1 as uint8) is a filler
        is_set &= (values[:, :, 1:] != values[:, :, :1]).any(axis=2)
    keys = np.zeros(values.shape[:2], np.uint64)
    chosen = values if known.all() else np.where(known, values, 0)
    for k in range(shape[1]):
        keys += table[chosen[:, :, k]]
    return _Chunk(values, keys, has_route, is_set)

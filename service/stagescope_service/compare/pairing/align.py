"""Which rows, and which parts of named tensors, of two sides are the same: the join over shards.

Nothing is given: how many ranks and microbatches there are, and which rows lie where, is what the
shards' indexes say. Only indexes are held, never values.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stagescope_service.compare.pairing.index import (
    KEYS,
    PROMPT,
    RESPONSE,
    ROW,
    RUN,
    SAMPLE,
    NamedShard,
    ShardIndex,
    row_label,
)
from stagescope_service.compare.pairing.pieces import Box
from stagescope_service.compare.pairing.shards import Part
from stagescope_service.compare.pairing.token_alignment import Pairing
from stagescope_service.dumps.records import Place


class Ref(NamedTuple):
    """A row of a shard."""

    shard: int
    row: int


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """How two sides' shards pair.

    Attributes:
        parts: (place of a shard in the first side's list, the parts that pair with it).
        keys: by what rows were paired.
        alone: labels of rows that one side alone has, of each side.
        unknown: rows of each side of which nothing says which they are.
        replicas: rows left out because they are there twice, of each side.
        conflicts: sample ids that a side has with several contents.
        coverage: (label, tokens of each side) of samples in fragments with other sums.
        names_alone: names of tensors that one side alone has, of each side.
        shapes: (name, shapes of the wholes) of named tensors that have other shapes.
    """

    parts: tuple[tuple[int, tuple[Part, ...]], ...] = ()
    keys: frozenset[str] = frozenset()
    alone: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    unknown: tuple[int, int] = (0, 0)
    replicas: tuple[int, int] = (0, 0)
    conflicts: tuple[str, ...] = ()
    coverage: tuple[tuple[str, int, int], ...] = ()
    names_alone: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every row of both sides found the same sample on the other one."""
        lacking = (*self.alone[0], *self.alone[1], *self.conflicts, *self.coverage)
        return not lacking and not any(self.unknown) and self.keys <= {SAMPLE, RUN, RESPONSE}


@dataclasses.dataclass(slots=True)
class _Found:
    pairs: dict[tuple[int, int, str, bool], list[tuple[int, int, str]]]
    keys: set[str]
    replicas: list[int]
    conflicts: list[str]
    coverage: list[tuple[str, int, int]]


Sides = tuple[Sequence[ShardIndex], Sequence[ShardIndex]]


def join(a: Sequence[ShardIndex], b: Sequence[ShardIndex], places: Mapping[Place, Place]) -> Join:
    """Pair the rows and named tensors of two sides.

    Args:
        a, b: indexes of the shards of each side.
        places: of every entry's place the form in which both sides' places are the same.
    """
    sides: Sides = (a, b)
    left = [
        {Ref(at, row) for at, shard in enumerate(side) for row in range(shard.rows)}
        for side in sides
    ]
    found = _Found(collections.defaultdict(list), set(), [0, 0], [], [])
    every = [shard for side in sides for shard in side if shard.rows]
    has_ids = any(all(kind in shard.keys for shard in every) for kind in (SAMPLE, RUN))
    for kind in KEYS:
        if kind == ROW and has_ids:
            break  # which samples they are is known: their places say nothing more
        keyed = [_by_key(side, rest, kind, places) for side, rest in zip(sides, left, strict=True)]
        shared = sorted(keyed[0].keys() & keyed[1].keys())
        for key in shared:
            _pair(sides, (keyed[0][key], keyed[1][key]), kind, found)
            for rest, each in zip(left, keyed, strict=True):
                rest.difference_update(each[key])
        if shared:
            found.keys.add(kind)
        if shared and kind in (SAMPLE, RUN):
            break
    alone, unknown = [], []
    for side, rest in zip(sides, left, strict=True):
        named = [ref for ref in sorted(rest) if side[ref.shard].keys]
        alone.append(tuple(dict.fromkeys(_label(side, ref) for ref in named)))
        unknown.append(len(rest) - len(named))
    boxes, names_alone, shapes = _join_named(a, b)
    return Join(
        parts=_parts(b, found, boxes), keys=frozenset(found.keys), alone=(alone[0], alone[1]),
        unknown=(unknown[0], unknown[1]), replicas=(found.replicas[0], found.replicas[1]),
        conflicts=tuple(found.conflicts), coverage=tuple(found.coverage),
        names_alone=names_alone, shapes=shapes,
    )  # fmt: skip


def is_in_place(joined: Join, a: Sequence[ShardIndex], places: Mapping[Place, Place]) -> bool:
    """Whether every row of both sides found its sample at its own place on the other one."""
    if any((*joined.alone, *joined.unknown)):
        return False
    return all(
        places[a[at].entry.place] == places[part.entry.place]
        and np.array_equal(part.pairing.rows_a, part.pairing.rows_b)
        for at, parts in joined.parts
        for part in parts
        if part.pairing is not None
    )


def _by_key(
    side: Sequence[ShardIndex], refs: Iterable[Ref], kind: str, places: Mapping[Place, Place]
) -> dict[str, list[Ref]]:
    found: dict[str, list[Ref]] = collections.defaultdict(list)
    for ref in sorted(refs):
        shard = side[ref.shard]
        if kind == ROW:
            if (SAMPLE in shard.keys or RUN in shard.keys) and RESPONSE in shard.keys:
                continue  # known by id and by content: what has no partner has none
            # Rows pair by their number only between shards of as many.
            key = f"{places[shard.entry.place]}|{shard.rows}|{ref.row}"
        elif kind in shard.keys:
            key = shard.keys[kind][ref.row]
        else:
            continue
        found[key].append(ref)
    if kind != PROMPT:
        return found
    return {f"{key}|{at}": [ref] for key, refs in found.items() for at, ref in enumerate(refs)}


def _pair(sides: Sides, refs: tuple[list[Ref], list[Ref]], kind: str, found: _Found) -> None:
    """Pair all rows of one key: replicas once, fragments each with each."""
    label = _label(sides[0], refs[0][0])
    unique = [_without_replicas(side, each) for side, each in zip(sides, refs, strict=True)]
    for at in range(2):
        found.replicas[at] += len(refs[at]) - len(unique[at])
    one, other = unique
    counts = [
        sum(side[ref.shard].counted[ref.row] for ref in each)
        for side, each in zip(sides, unique, strict=True)
    ]
    several = max(len(one), len(other)) > 1
    if (several or counts[0] != counts[1]) and _in_fragments(sides, unique):
        if counts[0] != counts[1]:
            found.coverage.append((label, counts[0], counts[1]))
        for x in one:
            for y in other:
                found.pairs[x.shard, y.shard, kind, True].append((x.row, y.row, label))
        return
    if kind in (SAMPLE, RUN) and several:
        found.conflicts.append(label)
    for at in range(max(len(one), len(other))):
        x, y = one[min(at, len(one) - 1)], other[min(at, len(other) - 1)]
        found.pairs[x.shard, y.shard, kind, False].append((x.row, y.row, label))


def _without_replicas(side: Sequence[ShardIndex], refs: list[Ref]) -> list[Ref]:
    kept: dict[str, Ref] = {}
    for ref in refs:
        digests = side[ref.shard].digests
        kept.setdefault(digests[ref.row] if digests else str(ref), ref)
    return list(kept.values())


def _in_fragments(sides: Sides, refs: Sequence[Sequence[Ref]]) -> bool:
    """Whether a side says positions, and every side that has a sample several times does."""
    said = [
        all(side[ref.shard].fragments for ref in each)
        for side, each in zip(sides, refs, strict=True)
    ]
    return any(said) and all(
        len(each) == 1 or known for each, known in zip(refs, said, strict=True)
    )


def _label(side: Sequence[ShardIndex], ref: Ref) -> str:
    shard = side[ref.shard]
    for kind in (SAMPLE, RUN):
        if kind in shard.keys:
            return shard.keys[kind][ref.row]
    return row_label(shard.entry.place, ref.row)


Boxes = dict[tuple[int, int], list[tuple[str, tuple[Box, Box]]]]
Shapes = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]


def _parts(
    b: Sequence[ShardIndex], found: _Found, boxes: Boxes
) -> tuple[tuple[int, tuple[Part, ...]], ...]:
    by_shard: dict[int, list[Part]] = collections.defaultdict(list)
    for (x, y, kind, by_position), rows in sorted(found.pairs.items()):
        pairs = np.array([row[:2] for row in rows], np.int64)
        labels = tuple(row[2] for row in rows)
        pairing = Pairing(pairs[:, 0].copy(), pairs[:, 1].copy(), labels, kind, by_position)
        by_shard[x].append(Part(b[y].entry, pairing))
    for (x, y), each in sorted(boxes.items()):
        by_shard[x].append(Part(b[y].entry, boxes=tuple(each)))
    return tuple((x, tuple(parts)) for x, parts in sorted(by_shard.items()))


def _join_named(
    a: Sequence[ShardIndex], b: Sequence[ShardIndex]
) -> tuple[Boxes, tuple[tuple[str, ...], tuple[str, ...]], Shapes]:
    one, other = _by_name(a), _by_name(b)
    boxes: Boxes = collections.defaultdict(list)
    shapes = []
    for name in sorted(one.keys() & other.keys()):
        wholes = (_whole(one[name]), _whole(other[name]))
        if wholes[0] != wholes[1]:
            shapes.append((name, *wholes))
            continue
        for x, shard_a in one[name]:
            for y, shard_b in other[name]:
                if (overlap := _overlap(shard_a, shard_b)) is not None:
                    boxes[x, y].append((name, overlap))
    alone = (tuple(sorted(one.keys() - other.keys())), tuple(sorted(other.keys() - one.keys())))
    return boxes, alone, tuple(shapes)


def _by_name(side: Sequence[ShardIndex]) -> dict[str, list[tuple[int, NamedShard]]]:
    """Return the shards of each name; of replicas (the same part again) the first."""
    found: dict[str, dict[tuple[object, ...], tuple[int, NamedShard]]] = {}
    for at, index in enumerate(side):
        for name, shard in index.named.items():
            part = (shard.offset, shard.shape)
            found.setdefault(name, {}).setdefault(part, (at, shard))
    return {name: list(parts.values()) for name, parts in found.items()}


def _whole(shards: Sequence[tuple[int, NamedShard]]) -> tuple[int, ...]:
    shard = shards[0][1]
    return shard.shape if shard.whole is None else shard.whole


def _overlap(a: NamedShard, b: NamedShard) -> tuple[Box, Box] | None:
    """Return the part that two shards of one tensor share, in the coordinates of each."""
    zeros = (0,) * len(a.shape)
    start_a, start_b = a.offset or zeros, b.offset or zeros
    boxes: tuple[list[slice], list[slice]] = ([], [])
    for at in range(len(a.shape)):
        low = max(start_a[at], start_b[at])
        high = min(start_a[at] + a.shape[at], start_b[at] + b.shape[at])
        if high <= low:
            return None
        boxes[0].append(slice(low - start_a[at], high - start_a[at]))
        boxes[1].append(slice(low - start_b[at], high - start_b[at]))
    return tuple(boxes[0]), tuple(boxes[1])

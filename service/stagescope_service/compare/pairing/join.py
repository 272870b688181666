"""Join the shards of two sides: find the rows, and boxes of named tensors, that are the same.

The number of ranks and microbatches and the locations of rows are read from the indexes of the
shards. Only indexes are in memory, never values.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stagescope_service.compare.pairing.shard_comparison import Box
from stagescope_service.compare.pairing.shard_index import (
    BY_GROUP_AND_RUN,
    BY_PROMPT,
    BY_RESPONSE,
    BY_ROW,
    BY_SAMPLE_ID,
    PAIRING_KEYS,
    NamedShard,
    ShardIndex,
    row_label,
)
from stagescope_service.compare.pairing.tasks import Counterpart
from stagescope_service.compare.pairing.token_alignment import RowPairing
from stagescope_service.dumps.records import Location


class RowRef(NamedTuple):
    """A row of a shard: index of the shard in its side's list, and of the row in the shard."""

    shard: int
    row: int


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """How the shards of two sides pair.

    Attributes:
        counterparts: (index of a shard of the first side, its counterparts on the second).
        keys: the kinds of keys that paired rows.
        unmatched: labels of rows that only one side has, of each side.
        unidentified: number of rows of each side that have neither key nor counterpart.
        replicas: number of rows left out as repetitions, of each side.
        conflicts: sample ids that a side has with several contents.
        coverage: (label, tokens of each side) of fragmented samples with other token counts.
        unmatched_names: names of tensors that only one side has, of each side.
        shapes: (name, full shape on each side) of named tensors whose shapes differ.
    """

    counterparts: tuple[tuple[int, tuple[Counterpart, ...]], ...] = ()
    keys: frozenset[str] = frozenset()
    unmatched: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    unidentified: tuple[int, int] = (0, 0)
    replicas: tuple[int, int] = (0, 0)
    conflicts: tuple[str, ...] = ()
    coverage: tuple[tuple[str, int, int], ...] = ()
    unmatched_names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every row of both sides is paired with the same sample."""
        lacking = (*self.unmatched[0], *self.unmatched[1], *self.conflicts, *self.coverage)
        is_sure = self.keys <= {BY_SAMPLE_ID, BY_GROUP_AND_RUN, BY_RESPONSE}
        return not lacking and not any(self.unidentified) and is_sure


@dataclasses.dataclass(slots=True)
class _PairedRows:
    """Rows that are paired so far.

    `pairs`: (shard of each side, kind of key, by position) -> (row of each side, label).
    """

    pairs: dict[tuple[int, int, str, bool], list[tuple[int, int, str]]]
    keys: set[str]
    replicas: list[int]
    conflicts: list[str]
    coverage: list[tuple[str, int, int]]


Sides = tuple[Sequence[ShardIndex], Sequence[ShardIndex]]


def join(
    a: Sequence[ShardIndex], b: Sequence[ShardIndex], common_locations: Mapping[Location, Location]
) -> Join:
    """Pair the rows and named tensors of two sides.

    Args:
        a, b: indexes of the shards of each side.
        common_locations: location of every entry -> the form of it that both sides share.
    """
    sides: Sides = (a, b)
    remaining = [
        {RowRef(at, row) for at, shard in enumerate(side) for row in range(shard.rows)}
        for side in sides
    ]
    paired = _PairedRows(collections.defaultdict(list), set(), [0, 0], [], [])
    with_rows = [shard for side in sides for shard in side if shard.rows]
    has_ids = any(
        all(kind in shard.keys for shard in with_rows) for kind in (BY_SAMPLE_ID, BY_GROUP_AND_RUN)
    )
    for kind in PAIRING_KEYS:
        if kind == BY_ROW and has_ids:
            break  # the samples are known: their locations add nothing
        keyed = [
            _refs_by_key(side, refs, kind, common_locations)
            for side, refs in zip(sides, remaining, strict=True)
        ]
        shared = sorted(keyed[0].keys() & keyed[1].keys())
        for key in shared:
            _pair_rows(sides, (keyed[0][key], keyed[1][key]), kind, paired)
            for refs, by_key in zip(remaining, keyed, strict=True):
                refs.difference_update(by_key[key])
        if shared:
            paired.keys.add(kind)
        if shared and kind in (BY_SAMPLE_ID, BY_GROUP_AND_RUN):
            break
    unmatched, unidentified = [], []
    for side, refs in zip(sides, remaining, strict=True):
        with_keys = [ref for ref in sorted(refs) if side[ref.shard].keys]
        unmatched.append(tuple(dict.fromkeys(_label(side, ref) for ref in with_keys)))
        unidentified.append(len(refs) - len(with_keys))
    boxes, unmatched_names, shapes = _join_named(a, b)
    return Join(
        counterparts=_counterparts(b, paired, boxes),
        keys=frozenset(paired.keys),
        unmatched=(unmatched[0], unmatched[1]),
        unidentified=(unidentified[0], unidentified[1]),
        replicas=(paired.replicas[0], paired.replicas[1]),
        conflicts=tuple(paired.conflicts),
        coverage=tuple(paired.coverage),
        unmatched_names=unmatched_names,
        shapes=shapes,
    )


def is_unmoved(
    joined: Join, a: Sequence[ShardIndex], common_locations: Mapping[Location, Location]
) -> bool:
    """Return whether every row is paired with the row of its own location and number."""
    if any((*joined.unmatched, *joined.unidentified)):
        return False
    return all(
        common_locations[a[at].entry.location] == common_locations[counterpart.entry.location]
        and np.array_equal(counterpart.pairing.rows_a, counterpart.pairing.rows_b)
        for at, counterparts in joined.counterparts
        for counterpart in counterparts
        if counterpart.pairing is not None
    )


def _refs_by_key(
    side: Sequence[ShardIndex],
    refs: Iterable[RowRef],
    kind: str,
    common_locations: Mapping[Location, Location],
) -> dict[str, list[RowRef]]:
    by_key: dict[str, list[RowRef]] = collections.defaultdict(list)
    for ref in sorted(refs):
        shard = side[ref.shard]
        if kind == BY_ROW:
            has_id = BY_SAMPLE_ID in shard.keys or BY_GROUP_AND_RUN in shard.keys
            if has_id and BY_RESPONSE in shard.keys:
                continue  # its sample is known by id and by content, and has no counterpart
            # Rows pair by their number only between shards with the same number of rows.
            key = f"{common_locations[shard.entry.location]}|{shard.rows}|{ref.row}"
        elif kind in shard.keys:
            key = shard.keys[kind][ref.row]
        else:
            continue
        by_key[key].append(ref)
    if kind != BY_PROMPT:
        return by_key
    return {f"{key}|{at}": [ref] for key, refs in by_key.items() for at, ref in enumerate(refs)}


def _pair_rows(
    sides: Sides, refs: tuple[list[RowRef], list[RowRef]], kind: str, paired: _PairedRows
) -> None:
    """Pair all rows of one key: replicas count once, each fragment pairs with each."""
    label = _label(sides[0], refs[0][0])
    unique = [_without_replicas(side, each) for side, each in zip(sides, refs, strict=True)]
    for at in range(2):
        paired.replicas[at] += len(refs[at]) - len(unique[at])
    one, other = unique
    tokens = [
        sum(side[ref.shard].token_counts[ref.row] for ref in each)
        for side, each in zip(sides, unique, strict=True)
    ]
    several = max(len(one), len(other)) > 1
    if (several or tokens[0] != tokens[1]) and _are_fragments(sides, unique):
        if tokens[0] != tokens[1]:
            paired.coverage.append((label, tokens[0], tokens[1]))
        for x in one:
            for y in other:
                paired.pairs[x.shard, y.shard, kind, True].append((x.row, y.row, label))
        return
    if kind in (BY_SAMPLE_ID, BY_GROUP_AND_RUN) and several:
        paired.conflicts.append(label)
    for at in range(max(len(one), len(other))):
        x, y = one[min(at, len(one) - 1)], other[min(at, len(other) - 1)]
        paired.pairs[x.shard, y.shard, kind, False].append((x.row, y.row, label))


def _without_replicas(side: Sequence[ShardIndex], refs: list[RowRef]) -> list[RowRef]:
    kept: dict[str, RowRef] = {}
    for ref in refs:
        hashes = side[ref.shard].row_hashes
        kept.setdefault(hashes[ref.row] if hashes else str(ref), ref)
    return list(kept.values())


def _are_fragments(sides: Sides, refs: Sequence[Sequence[RowRef]]) -> bool:
    """Return whether a side has positions, and so has each side that repeats the sample."""
    have_positions = [
        all(side[ref.shard].has_fragments for ref in each)
        for side, each in zip(sides, refs, strict=True)
    ]
    return any(have_positions) and all(
        len(each) == 1 or has_positions
        for each, has_positions in zip(refs, have_positions, strict=True)
    )


def _label(side: Sequence[ShardIndex], ref: RowRef) -> str:
    shard = side[ref.shard]
    for kind in (BY_SAMPLE_ID, BY_GROUP_AND_RUN):
        if kind in shard.keys:
            return shard.keys[kind][ref.row]
    return row_label(shard.entry.location, ref.row)


Boxes = dict[tuple[int, int], list[tuple[str, tuple[Box, Box]]]]
Shapes = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]


def _counterparts(
    b: Sequence[ShardIndex], paired: _PairedRows, boxes: Boxes
) -> tuple[tuple[int, tuple[Counterpart, ...]], ...]:
    by_shard: dict[int, list[Counterpart]] = collections.defaultdict(list)
    for (x, y, kind, by_position), rows in sorted(paired.pairs.items()):
        pairs = np.array([row[:2] for row in rows], np.int64)
        labels = tuple(row[2] for row in rows)
        pairing = RowPairing(pairs[:, 0].copy(), pairs[:, 1].copy(), labels, kind, by_position)
        by_shard[x].append(Counterpart(b[y].entry, pairing))
    for (x, y), named_boxes in sorted(boxes.items()):
        by_shard[x].append(Counterpart(b[y].entry, boxes=tuple(named_boxes)))
    return tuple((x, tuple(counterparts)) for x, counterparts in sorted(by_shard.items()))


def _join_named(
    a: Sequence[ShardIndex], b: Sequence[ShardIndex]
) -> tuple[Boxes, tuple[tuple[str, ...], tuple[str, ...]], Shapes]:
    """Return the boxes that shards share, the names of only one side, and unequal shapes."""
    one, other = _shards_by_name(a), _shards_by_name(b)
    boxes: Boxes = collections.defaultdict(list)
    shapes = []
    for name in sorted(one.keys() & other.keys()):
        full_shapes = (_full_shape(one[name]), _full_shape(other[name]))
        if full_shapes[0] != full_shapes[1]:
            shapes.append((name, *full_shapes))
            continue
        for x, shard_a in one[name]:
            for y, shard_b in other[name]:
                if (overlap := _overlap(shard_a, shard_b)) is not None:
                    boxes[x, y].append((name, overlap))
    only_a, only_b = sorted(one.keys() - other.keys()), sorted(other.keys() - one.keys())
    return boxes, (tuple(only_a), tuple(only_b)), tuple(shapes)


def _shards_by_name(side: Sequence[ShardIndex]) -> dict[str, list[tuple[int, NamedShard]]]:
    """Return the shards of each name; keep only the first of replicas (the same box again)."""
    by_name: dict[str, dict[tuple[object, ...], tuple[int, NamedShard]]] = {}
    for at, index in enumerate(side):
        for name, shard in index.named.items():
            box = (shard.offset, shard.shape)
            by_name.setdefault(name, {}).setdefault(box, (at, shard))
    return {name: list(shards.values()) for name, shards in by_name.items()}


def _full_shape(shards: Sequence[tuple[int, NamedShard]]) -> tuple[int, ...]:
    shard = shards[0][1]
    return shard.shape if shard.full_shape is None else shard.full_shape


def _overlap(a: NamedShard, b: NamedShard) -> tuple[Box, Box] | None:
    """Return the box that two shards of one tensor share, in the coordinates of each."""
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

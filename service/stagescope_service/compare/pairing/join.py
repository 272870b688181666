"""Join the shards of two sides: find the rows, and boxes of named tensors, that are the same.

The number of ranks and microbatches and the locations of rows are read from the indexes of the
shards. Only indexes are in memory, never values.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
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


Shape = tuple[int, ...]
Sides = tuple[Sequence[ShardIndex], Sequence[ShardIndex]]
Boxes = dict[tuple[int, int], list[tuple[str, tuple[Box, Box]]]]
"""(shard of each side) -> (name, the part of the tensor that both hold)."""
Pairs = dict[tuple[int, int, str, bool], list[tuple[int, int, str]]]
"""(shard of each side, kind of key, by position) -> (row of each side, label)."""


def _of_each_side() -> tuple[list[str], list[str]]:
    return [], []


@dataclasses.dataclass(slots=True)
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

    counterparts: list[tuple[int, tuple[Counterpart, ...]]] = dataclasses.field(
        default_factory=list
    )
    keys: set[str] = dataclasses.field(default_factory=set)
    unmatched: tuple[list[str], list[str]] = dataclasses.field(default_factory=_of_each_side)
    unidentified: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    replicas: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    conflicts: list[str] = dataclasses.field(default_factory=list)
    coverage: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    unmatched_names: tuple[list[str], list[str]] = dataclasses.field(default_factory=_of_each_side)
    shapes: list[tuple[str, Shape, Shape]] = dataclasses.field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every row of both sides is paired with the same sample."""
        lacking = (*self.unmatched[0], *self.unmatched[1], *self.conflicts, *self.coverage)
        is_sure = self.keys <= {BY_SAMPLE_ID, BY_GROUP_AND_RUN, BY_RESPONSE}
        return not lacking and not any(self.unidentified) and is_sure


def join(
    a: Sequence[ShardIndex], b: Sequence[ShardIndex], common_locations: Mapping[Location, Location]
) -> Join:
    """Pair the rows and named tensors of two sides.

    Args:
        a, b: indexes of the shards of each side.
        common_locations: location of every entry -> the form of it that both sides share.
    """
    sides: Sides = (a, b)
    joined = Join()
    pairs: Pairs = collections.defaultdict(list)
    remaining = [
        {RowRef(at, row) for at, shard in enumerate(side) for row in range(shard.rows)}
        for side in sides
    ]
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
            _pair_rows(sides, (keyed[0][key], keyed[1][key]), kind, joined, pairs)
            for refs, by_key in zip(remaining, keyed, strict=True):
                refs.difference_update(by_key[key])
        if shared:
            joined.keys.add(kind)
        if shared and kind in (BY_SAMPLE_ID, BY_GROUP_AND_RUN):
            break
    for at, (side, refs) in enumerate(zip(sides, remaining, strict=True)):
        with_keys = [ref for ref in sorted(refs) if side[ref.shard].keys]
        joined.unmatched[at].extend(dict.fromkeys(_label(side, ref) for ref in with_keys))
        joined.unidentified[at] = len(refs) - len(with_keys)
    boxes = _join_named(sides, joined)
    joined.counterparts = _counterparts(b, pairs, boxes)
    return joined


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
    sides: Sides, refs: tuple[list[RowRef], list[RowRef]], kind: str, joined: Join, pairs: Pairs
) -> None:
    """Pair all rows of one key: replicas count once, each fragment pairs with each."""
    label = _label(sides[0], refs[0][0])
    unique = [_without_replicas(side, each) for side, each in zip(sides, refs, strict=True)]
    for at in range(2):
        joined.replicas[at] += len(refs[at]) - len(unique[at])
    one, other = unique
    tokens = [
        sum(side[ref.shard].token_counts[ref.row] for ref in each)
        for side, each in zip(sides, unique, strict=True)
    ]
    several = max(len(one), len(other)) > 1
    if (several or tokens[0] != tokens[1]) and _are_fragments(sides, unique):
        if tokens[0] != tokens[1]:
            joined.coverage.append((label, tokens[0], tokens[1]))
        for x in one:
            for y in other:
                pairs[x.shard, y.shard, kind, True].append((x.row, y.row, label))
        return
    if kind in (BY_SAMPLE_ID, BY_GROUP_AND_RUN) and several:
        joined.conflicts.append(label)
    for at in range(max(len(one), len(other))):
        x, y = one[min(at, len(one) - 1)], other[min(at, len(other) - 1)]
        pairs[x.shard, y.shard, kind, False].append((x.row, y.row, label))


def _without_replicas(side: Sequence[ShardIndex], refs: list[RowRef]) -> list[RowRef]:
    first: dict[str, RowRef] = {}
    for ref in refs:
        hashes = side[ref.shard].row_hashes
        first.setdefault(hashes[ref.row] if hashes else str(ref), ref)
    return list(first.values())


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


def _counterparts(
    b: Sequence[ShardIndex], pairs: Pairs, boxes: Boxes
) -> list[tuple[int, tuple[Counterpart, ...]]]:
    by_shard: dict[int, list[Counterpart]] = collections.defaultdict(list)
    for (x, y, kind, by_position), rows in sorted(pairs.items()):
        rows_a, rows_b, labels = zip(*rows, strict=True)
        pairing = RowPairing(
            np.array(rows_a, np.int64), np.array(rows_b, np.int64), labels, kind, by_position
        )
        by_shard[x].append(Counterpart(b[y].entry, pairing))
    for (x, y), named_boxes in sorted(boxes.items()):
        by_shard[x].append(Counterpart(b[y].entry, boxes=tuple(named_boxes)))
    return [(x, tuple(counterparts)) for x, counterparts in sorted(by_shard.items())]


def _join_named(sides: Sides, joined: Join) -> Boxes:
    """Return the boxes that shards share; add names of only one side, and unequal shapes."""
    one, other = map(_shards_by_name, sides)
    joined.unmatched_names = (sorted(one.keys() - other.keys()), sorted(other.keys() - one.keys()))
    boxes: Boxes = collections.defaultdict(list)
    for name in sorted(one.keys() & other.keys()):
        full_shapes = [next(iter(shards[name])).full_shape for shards in (one, other)]
        if full_shapes[0] != full_shapes[1]:
            joined.shapes.append((name, full_shapes[0], full_shapes[1]))
            continue
        for (shard_a, x), (shard_b, y) in itertools.product(one[name].items(), other[name].items()):
            if (overlap := _overlap(shard_a, shard_b)) is not None:
                boxes[x, y].append((name, overlap))
    return boxes


def _shards_by_name(side: Sequence[ShardIndex]) -> dict[str, dict[NamedShard, int]]:
    """Return name -> box -> the first shard that holds it; other ones are replicas."""
    by_name: dict[str, dict[NamedShard, int]] = collections.defaultdict(dict)
    for at, index in enumerate(side):
        for name, shard in index.named.items():
            by_name[name].setdefault(shard, at)
    return by_name


def _overlap(a: NamedShard, b: NamedShard) -> tuple[Box, Box] | None:
    """Return the box that two shards of one tensor share, in the coordinates of each."""
    low = np.maximum(a.offset, b.offset)
    high = np.minimum(np.add(a.offset, a.shape), np.add(b.offset, b.shape))
    if (high <= low).any():
        return None
    one, other = (
        tuple(map(slice, (low - shard.offset).tolist(), (high - shard.offset).tolist()))
        for shard in (a, b)
    )
    return one, other

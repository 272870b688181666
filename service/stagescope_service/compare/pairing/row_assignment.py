"""How two sides dealt their samples out: which rows a shard holds where its own file says nothing.

A loss, or the intermediates of one, are of the rows of a microbatch; their files may hold neither
ids nor tokens (NexRL's `is_loss_debug`, `loss`). The shard of the same rank and part that has
tokens (`forward_data`, `batch_inputs`) says which rows they are. Where the sides dealt samples out
in another order, or into other parts, nothing pairs by its place alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stagescope.batch import Tensor, widened
from stagescope.wire.errors import StagescopeError
from stagescope_service.compare.pairing.index import RESPONSE, ROW, RUN, SAMPLE, ShardIndex
from stagescope_service.compare.pairing.layout import Layout
from stagescope_service.compare.pairing.pieces import Piece
from stagescope_service.compare.pairing.rows import Rows
from stagescope_service.compare.pairing.shards import Outcome
from stagescope_service.compare.plan import Pair
from stagescope_service.dumps.records import Dump, Entry, Place

_KNOWN: Final = (SAMPLE, RUN, RESPONSE)
_CLOSE: Final = 0.5
"""Log-probs of the same rows are at most so far apart, of the distance of others."""

Keys = tuple[str, ...]
_Locations = dict[tuple[str, str], set[tuple[Place, tuple[Any, ...]]]]
"""(kind, key) of a row -> at which places, and at which rank and part, it lies."""
_DRIVER: Final = "driver"
"""The role of what has no ranks: it holds whole steps, and says nothing of how they are split."""


class RowAssignment:
    """What is known of the rows at each place of two sides."""

    def __init__(self, *, several_steps: bool = False) -> None:
        self._several_steps = several_steps
        self._shards: tuple[dict[Place, ShardIndex], dict[Place, ShardIndex]] = ({}, {})
        self._locations: tuple[_Locations, _Locations] = ({}, {})
        self._processes: tuple[set[tuple[str | None, str | None]], ...] = (set(), set())
        """(stage, role) of the places that are known, of each side."""
        self._responses: tuple[dict[str, str], dict[str, str]] = ({}, {})
        """Sample id -> key of its response."""
        self._alike: set[Place] = set()
        self._files: set[Path] = set()
        self.is_reordered = False
        """Whether trajectories that are known lie elsewhere, or on one side only."""

    def learn(self, pair: Pair, outcome: Outcome) -> None:
        """Take in what was found of a shard of rows on each side."""
        one, other = pair
        if outcome.in_order and one is not None and other is not None:
            self._alike |= {one.place, other.place}
            self._files |= {one.path, other.path}
        for side, index in enumerate(outcome.index):
            if index is not None and index.rows and any(kind in index.keys for kind in _KNOWN):
                self._shards[side].setdefault(index.entry.place, index)
                self._note_locations(side, index)
                ids, responses = (index.keys.get(kind, ()) for kind in (SAMPLE, RESPONSE))
                self._responses[side].update(zip(ids, responses, strict=False))

    def is_told(self, pair: Pair) -> bool:
        """Whether shards of tokens say how the rows at these places pair: they are joined then."""
        return any(
            entry is not None and bool(self._rows_of(side, entry))
            for side, entry in enumerate(pair)
        )

    def is_told_of_ranks(self, pair: Pair) -> bool:
        """Whether the shards of ranks may say what two files of a whole step hold."""
        return all(
            entry is not None and entry.place.rank is None and self._of_ranks(side, entry.place)
            for side, entry in enumerate(pair)
        )

    def named(
        self, sides: Sequence[Sequence[ShardIndex]], dumps: Sequence[Dump]
    ) -> list[list[ShardIndex]]:
        """Return the shards of a unit of both sides with keys of rows that other shards know.

        Where both sides say the same kind of key themselves, and share some, they are as they were.
        """
        if any(_share(sides, kind) for kind in _KNOWN):
            return [list(side) for side in sides]
        return [
            [self._named(at, index, dump) for index in side]
            for at, (side, dump) in enumerate(zip(sides, dumps, strict=True))
        ]

    def _named(self, side: int, index: ShardIndex, dump: Dump) -> ShardIndex:
        """Return what a shard holds with the keys of its rows, where other shards know them.

        A file of a whole step (NexRL's `old_log_probs`) may hold the rows of rank 0's first part,
        then those of its second, ...: only where the log-probs of these shards say so, too.
        """
        keys = self._rows_of(side, index.entry)
        if index.entry.place.rank is None and not keys:
            shards = self._of_ranks(side, index.entry.place)
            kinds = [k for k in _KNOWN if shards and all(k in each.keys for each in shards)]
            keys = {k: tuple(key for each in shards for key in each.keys[k]) for k in kinds}
            starts = [0, index.rows - shards[-1].rows] if shards else []
            checked = zip((shards[0], shards[-1]) if shards else (), starts, strict=True)
            if not all(_lies_at(dump, index.entry, shard.entry, at) for shard, at in checked):
                return index
        if not index.rows or any(len(each) != index.rows for each in keys.values()):
            return index
        named = {**keys, **index.keys}
        known = [self._responses[side].get(each, "") for each in named.get(SAMPLE, ())]
        if known and all(known):  # two runs may have named the same samples otherwise
            named.setdefault(RESPONSE, tuple(known))
        return dataclasses.replace(index, keys=named)

    def confirms(self, place: Place, pair: Pair) -> bool:
        """Whether tokens showed that rows lie in the same order on both sides at a place."""
        if all(entry is not None and entry.path in self._files for entry in pair):
            return True
        if place.rank is not None:
            return place in self._alike
        ranks = [each for each in self._alike if each.step == place.step and each.rank is not None]
        return bool(ranks) and not self._of_ranks(0, place)

    def why_unproven(self, piece: Piece, pair: Pair, *, is_uneven: bool) -> str:
        """Return why what was paired by its place may be of other samples; empty if it is not.

        Args:
            piece: what was compared; numbers are of all rows of their place.
            couple: of what, where it was compared as it lies.
            is_uneven: whether the sides have other ranks, parts or numbers of rows there.
        """
        if piece.rows is None:
            by_place = piece.places[0].rank is not None and not self.is_told(pair)
        else:
            by_place = piece.key == ROW
        if not by_place or self.confirms(piece.places[0], pair):
            return ""
        if is_uneven:
            return "paired by place, and the sides have other ranks, parts or numbers of rows"
        if self.is_reordered:
            return "paired by place, and the trajectories are others or in another order"
        return ""

    def is_moved(self, pair: Pair) -> bool:
        """Whether samples of these places lie elsewhere on the other side, and not here too."""
        return any(
            self._lies_elsewhere(1 - side, entry, kind, key)
            for side, entry in enumerate(pair)
            if entry is not None and _is_of_a_rank(entry.place)
            for kind, keys in self._rows_of(side, entry).items()
            for key in keys
        )

    def _lies_elsewhere(self, side: int, entry: Entry, kind: str, key: str) -> bool:
        """Whether a side holds a row in the same stage of the same role, and not at this place.

        Stages split a step differently (a whole rank's rows, then minibatches of them): only where
        one side does not know the stage or the role, any of the other's may be the same.
        """
        found = list(self._locations[side].get((kind, key), ()))
        stage, role = entry.place.stage, entry.place.role
        known = self._processes[side]
        if any(each == stage for each, _ in known):
            found = [each for each in found if each[0].stage == stage]
        if any(each == role for _, each in known):
            found = [each for each in found if each[0].role == role]
        return bool(found) and self._rank_and_part(entry) not in {where for _, where in found}

    def same_samples(self, pair: Pair) -> bool:
        """Whether two shards are of the same samples, as far as anything tells."""
        if not self.is_moved(pair):
            return True
        return self._is_alike(pair, self._common_kind([pair]))

    def recoupled(self, entry_pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
        """Pair entries by the samples that they are of, where the sides dealt them out otherwise.

        Args:
            entry_pairs: of one section and unit, paired by place.

        Returns:
            Couples of the same samples, or of which nothing is told; and those that the sides
            dealt into other parts, which have no counterpart.
        """
        if not any(map(self.is_moved, entry_pairs)):
            return list(entry_pairs), []
        kind = self._common_kind(entry_pairs)
        kept: list[Pair] = []
        left: tuple[dict[Keys, list[Entry]], dict[Keys, list[Entry]]] = ({}, {})
        for pair in entry_pairs:
            samples = [
                () if entry is None else self._samples_of(side, entry, kind)
                for side, entry in enumerate(pair)
            ]
            if samples[0] == samples[1] or any(
                entry is not None and not each for entry, each in zip(pair, samples, strict=True)
            ):
                kept.append(pair)  # of the same samples, or nothing tells of which a side is
                continue
            for side, entry in enumerate(pair):
                if entry is not None:
                    left[side].setdefault(samples[side], []).append(entry)
        apart: list[Pair] = []
        for keys in left[0] | left[1]:
            for one, other in itertools.zip_longest(*(each.get(keys, ()) for each in left)):
                (apart if None in (one, other) else kept).append((one, other))
        return kept, apart

    def _is_alike(self, pair: Pair, kind: str) -> bool:
        one, other = (
            () if entry is None else self._samples_of(side, entry, kind)
            for side, entry in enumerate(pair)
        )
        return bool(one) and one == other

    def _note_locations(self, side: int, index: ShardIndex) -> None:
        place = index.entry.place
        if not _is_of_a_rank(place):
            return
        self._processes[side].add((place.stage, place.role))
        location = (place, self._rank_and_part(index.entry))
        for kind in _KNOWN:
            for key in index.keys.get(kind, ()):
                self._locations[side].setdefault((kind, key), set()).add(location)

    def _rank_and_part(self, entry: Entry) -> tuple[Any, ...]:
        place = entry.place
        return (place.step if self._several_steps else None, place.rank, place.part)

    def _common_kind(self, entry_pairs: Iterable[Pair]) -> str:
        """Return by what the rows of all these entries are known, of those of which it is told."""
        keys = [
            rows
            for pair in entry_pairs
            for side, entry in enumerate(pair)
            if entry is not None and (rows := self._rows_of(side, entry))
        ]
        return next((kind for kind in _KNOWN if all(kind in each for each in keys)), ROW)

    def _samples_of(self, side: int, entry: Entry, kind: str) -> Keys:
        return tuple(sorted(self._rows_of(side, entry).get(kind, ())))

    def _rows_of(self, side: int, entry: Entry) -> Mapping[str, Keys]:
        """Return the keys of the rows that an entry is of; none where nothing tells.

        Files of a whole step may hold its rows in any order: there only the same file tells.
        """
        index = self._shards[side].get(entry.place)
        if index is None or (entry.place.rank is None and entry.path != index.entry.path):
            return {}
        return {kind: index.keys[kind] for kind in _KNOWN if kind in index.keys}

    def _of_ranks(self, side: int, place: Place) -> list[ShardIndex]:
        """Return the shards of a step's ranks in the order of ranks and parts."""
        found = self._shards[side]
        of_step = [each for each in found if each.step == place.step and each.rank is not None]
        return [found[each] for each in sorted(of_step, key=lambda p: (p.rank or 0, p.part))]


def _is_of_a_rank(place: Place) -> bool:
    return place.rank is not None and place.role != _DRIVER


def _share(sides: Sequence[Sequence[ShardIndex]], kind: str) -> bool:
    """Whether all rows of both sides have a kind of key, and any of them is on both."""
    of_rows = [[index for index in side if index.rows] for side in sides]
    if not all(kind in index.keys for side in of_rows for index in side):
        return False
    one, other = ({key for index in side for key in index.keys[kind]} for side in of_rows)
    return not one or not other or not one.isdisjoint(other)


def _lies_at(dump: Dump, whole: Entry, shard: Entry, start: int) -> bool:
    """Say whether the rows of a shard are those from `start` on in a file of the whole step.

    Its log-probs are those before the update and the shard's those in it: of the same rows they
    are close, of a row and its neighbour they are not.
    """
    try:
        before, now = Rows(dump.read(whole)), Rows(dump.read(shard))
    except StagescopeError:
        return False
    old, new = before.layout("old_log_probs"), now.layout("log_probs")
    mask = None if new is None else now.mask_of("log_probs")
    if old is None or new is None or mask is None or old.width is None or old.width != new.width:
        return False
    count = now.count or 0
    if count < 2 or not 0 <= start <= (before.count or 0) - count:
        return False
    ones = now.ones(mask).reshape(count, -1)
    if not ones.any():
        return False
    mine = _values(old)[start : start + count]
    theirs = _values(new)
    with np.errstate(invalid="ignore"):
        apart = np.abs(mine - theirs)[ones].mean()
        moved = np.abs(np.roll(mine, 1, axis=0) - theirs)[ones].mean()
    return bool(apart < _CLOSE * moved)


def _values(layout: Layout) -> npt.NDArray[np.float64]:
    values = widened(Tensor(layout.dtype, layout.flat)).astype(np.float64)
    return values.reshape(-1, layout.width or 1)

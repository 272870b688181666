"""How two sides split their samples over shards: the rows of shards that do not name them.

A loss and its intermediates belong to a microbatch's rows, but their files may hold neither ids nor
tokens (NexRL's `is_loss_debug`, `loss`). The shard of the same rank and part that has tokens
(`forward_data`, `batch_inputs`) identifies the rows. If the sides split their samples in another
order, or into other parts, nothing pairs by its location alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from stagescope_service.compare.pairing.contents_rows import ContentsRows, rows_start_at
from stagescope_service.compare.pairing.shard_comparison import Doubt, ShardComparison
from stagescope_service.compare.pairing.shard_index import (
    BY_GROUP_AND_RUN,
    BY_RESPONSE,
    BY_ROW,
    BY_SAMPLE_ID,
    ShardIndex,
)
from stagescope_service.compare.pairing.tasks import TaskOutcome
from stagescope_service.compare.task_runner import EntryPair
from stagescope_service.dumps.records import Dump, DumpEntry, Location
from stagescope_service.rows.ragged import Int64
from stagescope_wire.errors import StagescopeError
from stagescope_wire.schema import Part

_IDENTIFYING_KEYS: Final = (BY_SAMPLE_ID, BY_GROUP_AND_RUN, BY_RESPONSE)
_DRIVER: Final = "driver"
"""Role of a process that holds whole steps: it does not show how ranks split them."""

Keys = tuple[str, ...]


class _RankPart(NamedTuple):
    """Rank and part of a location, and its step if the sides hold several steps."""

    step: int | None
    rank: int | None
    part: Part


_LocationsByKey = dict[tuple[str, str], set[tuple[Location, _RankPart]]]
"""(kind, key) of a row -> its locations."""


class RowAssignment:
    """The rows that each location of two sides is known to hold."""

    def __init__(self, *, several_steps: bool = False) -> None:
        self._several_steps = several_steps
        self._shards: tuple[dict[Location, ShardIndex], dict[Location, ShardIndex]] = ({}, {})
        self._locations: tuple[_LocationsByKey, _LocationsByKey] = ({}, {})
        self._stages_and_roles: tuple[set[tuple[str | None, str | None]], ...] = (set(), set())
        """(stage, role) of the locations whose rows are known, of each side."""
        self._responses: tuple[dict[str, str], dict[str, str]] = ({}, {})
        """Sample id -> key of its response."""
        self._confirmed_locations: set[Location] = set()
        self._confirmed_files: set[Path] = set()
        self.is_reordered = False
        """Whether trajectories are known to have other locations, or to be on one side only."""
        self.is_permuted = False
        """Whether rows without ids and tokens seem to have other locations: see `Doubt`."""

    def record_outcome(self, pair: EntryPair, outcome: TaskOutcome) -> None:
        """Record which rows a task found in the shard of each side."""
        one, other = pair
        if outcome.in_order and one is not None and other is not None:
            self._confirmed_locations |= {one.location, other.location}
            self._confirmed_files |= {one.path, other.path}
        for side, index in enumerate(outcome.indexes):
            if index is None or not index.rows:
                continue
            if any(kind in index.keys for kind in _IDENTIFYING_KEYS):
                self._shards[side].setdefault(index.entry.location, index)
                self._add_locations(side, index)
                ids, responses = (index.keys.get(kind, ()) for kind in (BY_SAMPLE_ID, BY_RESPONSE))
                self._responses[side].update(zip(ids, responses, strict=False))

    def is_identified(self, pair: EntryPair) -> bool:
        """Return whether shards with tokens identify rows of these entries: they are joined."""
        return any(
            entry is not None and bool(self._keys_of(side, entry))
            for side, entry in enumerate(pair)
        )

    def is_identified_by_ranks(self, pair: EntryPair) -> bool:
        """Return whether the shards of ranks may identify the rows of two files of a whole step."""
        return all(
            entry is not None
            and entry.location.rank is None
            and self._rank_shards(side, entry.location)
            for side, entry in enumerate(pair)
        )

    def with_known_keys(
        self, sides: Sequence[Sequence[ShardIndex]], dumps: Sequence[Dump]
    ) -> list[list[ShardIndex]]:
        """Return the shards of a pass of both sides, with the keys that other shards know.

        If both sides have the same kind of key themselves, and share some, they stay unchanged.
        """
        if any(_share_keys(sides, kind) for kind in _IDENTIFYING_KEYS):
            return [list(side) for side in sides]
        return [
            [self._with_known_keys(at, index, dump) for index in side]
            for at, (side, dump) in enumerate(zip(sides, dumps, strict=True))
        ]

    def _with_known_keys(self, side: int, index: ShardIndex, dump: Dump) -> ShardIndex:
        """Return a shard's index with the keys that other shards know of its rows.

        A file of a whole step (NexRL's `old_log_probs`) may hold the rows of rank 0's first part,
        then those of its second, and so on. This is assumed only if the shards' log-probs agree.
        """
        keys = self._keys_of(side, index.entry)
        is_whole_step = index.entry.location.rank is None and not keys
        shards = self._rank_shards(side, index.entry.location) if is_whole_step else []
        if shards:
            kinds = [kind for kind in _IDENTIFYING_KEYS if all(kind in s.keys for s in shards)]
            keys = {kind: tuple(key for s in shards for key in s.keys[kind]) for kind in kinds}
            ends = ((shards[0], 0), (shards[-1], index.rows - shards[-1].rows))
            if not all(_holds_rows_at(dump, index.entry, shard.entry, at) for shard, at in ends):
                return index
        if not index.rows or any(len(each) != index.rows for each in keys.values()):
            return index
        merged = {**keys, **index.keys}
        responses = [self._responses[side].get(each, "") for each in merged.get(BY_SAMPLE_ID, ())]
        if responses and all(responses):  # two runs may name the same samples differently
            merged.setdefault(BY_RESPONSE, tuple(responses))
        return dataclasses.replace(index, keys=merged)

    def confirms_order(self, location: Location, pair: EntryPair) -> bool:
        """Return whether tokens showed the same order of rows on both sides at a location."""
        if all(entry is not None and entry.path in self._confirmed_files for entry in pair):
            return True
        if location.rank is not None:
            return location in self._confirmed_locations
        has_ranks = any(
            each.step == location.step and each.rank is not None
            for each in self._confirmed_locations
        )
        return has_ranks and not self._rank_shards(0, location)

    def with_doubts(
        self, comparisons: Sequence[ShardComparison], pair: EntryPair, *, is_uneven: bool
    ) -> tuple[ShardComparison, ...]:
        """Return comparisons with why their two sides may be of other samples, where they may.

        Args:
            comparisons: of one pair of records; numbers are of all rows of their location.
            pair: the entries that were compared directly; (None, None) of joined rows.
            is_uneven: whether the sides have other ranks, parts or numbers of rows there.
        """
        is_permuted = any(
            each.rows is not None and each.key == BY_ROW and is_permuted_by(each.rows.lengths)
            for each in comparisons
        )
        return tuple(
            dataclasses.replace(each, doubt=self._doubt(each, pair, is_uneven, is_permuted))
            for each in comparisons
        )

    def _doubt(
        self, comparison: ShardComparison, pair: EntryPair, is_uneven: bool, is_permuted: bool
    ) -> Doubt | None:
        if comparison.rows is None:
            by_location = comparison.locations[0].rank is not None and not all(
                entry is not None and self._keys_of(side, entry) for side, entry in enumerate(pair)
            )
        else:
            by_location = comparison.key == BY_ROW
        if not by_location or self.confirms_order(comparison.locations[0], pair):
            return None
        if is_uneven:
            return Doubt.OTHER_LAYOUT
        if self.is_reordered:
            return Doubt.OTHER_ORDER
        is_permuted = is_permuted and comparison.rows is not None
        return Doubt.SAME_LENGTHS if is_permuted or self.is_permuted else None

    def is_moved(self, pair: EntryPair) -> bool:
        """Return whether samples of these entries have only other locations on the other side."""
        return any(
            self._is_elsewhere(1 - side, entry, kind, key)
            for side, entry in enumerate(pair)
            if entry is not None and _is_of_rank(entry.location)
            for kind, keys in self._keys_of(side, entry).items()
            for key in keys
        )

    def _is_elsewhere(self, side: int, entry: DumpEntry, kind: str, key: str) -> bool:
        """Return whether a side holds a row in an entry's stage and role, at another location only.

        Stages split a step differently (a whole rank's rows, then minibatches of them). So other
        stages and roles count only if the side does not know the entry's own.
        """
        locations = list(self._locations[side].get((kind, key), ()))
        stage, role = entry.location.stage, entry.location.role
        known = self._stages_and_roles[side]
        if any(each == stage for each, _ in known):
            locations = [each for each in locations if each[0].stage == stage]
        if any(each == role for _, each in known):
            locations = [each for each in locations if each[0].role == role]
        rank_parts = {rank_part for _, rank_part in locations}
        return bool(locations) and self._rank_part(entry) not in rank_parts

    def has_same_samples(self, pair: EntryPair) -> bool:
        """Return whether two shards have the same samples, as far as is known."""
        if not self.is_moved(pair):
            return True
        one, other = self._samples_of(pair, self._common_kind([pair]))
        return bool(one) and one == other

    def pair_by_samples(
        self, entry_pairs: Sequence[EntryPair]
    ) -> tuple[list[EntryPair], list[EntryPair]]:
        """Pair entries by their samples where the sides split these differently.

        Args:
            entry_pairs: entries of one section and pass, paired by location.

        Returns:
            Pairs of the same samples, or of unknown ones; and entries without a counterpart, since
            the other side has no part with their samples.
        """
        if not any(map(self.is_moved, entry_pairs)):
            return list(entry_pairs), []
        kind = self._common_kind(entry_pairs)
        paired: list[EntryPair] = []
        remaining: tuple[dict[Keys, list[DumpEntry]], dict[Keys, list[DumpEntry]]] = ({}, {})
        for pair in entry_pairs:
            samples = self._samples_of(pair, kind)
            is_unknown = any(
                entry is not None and not each for entry, each in zip(pair, samples, strict=True)
            )
            if samples[0] == samples[1] or is_unknown:
                paired.append(pair)
                continue
            for side, entry in enumerate(pair):
                if entry is not None:
                    remaining[side].setdefault(samples[side], []).append(entry)
        unpaired: list[EntryPair] = []
        for keys in remaining[0] | remaining[1]:
            for one, other in itertools.zip_longest(*(each.get(keys, ()) for each in remaining)):
                (unpaired if None in (one, other) else paired).append((one, other))
        return paired, unpaired

    def _add_locations(self, side: int, index: ShardIndex) -> None:
        location = index.entry.location
        if not _is_of_rank(location):
            return
        self._stages_and_roles[side].add((location.stage, location.role))
        for kind in _IDENTIFYING_KEYS:
            for key in index.keys.get(kind, ()):
                locations = self._locations[side].setdefault((kind, key), set())
                locations.add((location, self._rank_part(index.entry)))

    def _rank_part(self, entry: DumpEntry) -> _RankPart:
        location = entry.location
        step = location.step if self._several_steps else None
        return _RankPart(step, location.rank, location.part)

    def _common_kind(self, entry_pairs: Iterable[EntryPair]) -> str:
        """Return a kind of key that the rows of all identified entries have."""
        identified = [
            keys
            for pair in entry_pairs
            for side, entry in enumerate(pair)
            if entry is not None and (keys := self._keys_of(side, entry))
        ]
        common = (k for k in _IDENTIFYING_KEYS if all(k in keys for keys in identified))
        return next(common, BY_ROW)

    def _samples_of(self, pair: EntryPair, kind: str) -> tuple[Keys, Keys]:
        """Return the sorted keys of each entry's rows; empty where they are unknown."""
        one, other = (
            () if entry is None else tuple(sorted(self._keys_of(side, entry).get(kind, ())))
            for side, entry in enumerate(pair)
        )
        return one, other

    def _keys_of(self, side: int, entry: DumpEntry) -> Mapping[str, Keys]:
        """Return the keys of an entry's rows by kind; empty where they are unknown.

        A file of a whole step may hold its rows in any order: only itself identifies them.
        """
        index = self._shards[side].get(entry.location)
        if index is None or (entry.location.rank is None and entry.path != index.entry.path):
            return {}
        return {kind: index.keys[kind] for kind in _IDENTIFYING_KEYS if kind in index.keys}

    def _rank_shards(self, side: int, location: Location) -> list[ShardIndex]:
        """Return the shards of a step's ranks, ordered by rank and part."""
        shards = self._shards[side]
        of_step = [each for each in shards if each.step == location.step and each.rank is not None]
        return [shards[each] for each in sorted(of_step, key=lambda p: (p.rank or 0, p.part))]


def is_permuted_by(lengths: Int64) -> bool:
    """Return whether lengths ([rows, 2], of each side) are the same ones in another order."""
    one, other = lengths.T
    return bool((one != other).any() and (np.sort(one) == np.sort(other)).all())


def _is_of_rank(location: Location) -> bool:
    return location.rank is not None and location.role != _DRIVER


def _share_keys(sides: Sequence[Sequence[ShardIndex]], kind: str) -> bool:
    """Return whether all rows of both sides have a kind of key, and the sides share a key."""
    with_rows = [[index for index in side if index.rows] for side in sides]
    if not all(kind in index.keys for side in with_rows for index in side):
        return False
    one, other = ({key for index in side for key in index.keys[kind]} for side in with_rows)
    return not one or not other or not one.isdisjoint(other)


def _holds_rows_at(dump: Dump, whole_step: DumpEntry, shard: DumpEntry, start: int) -> bool:
    """Return whether a file of a whole step holds a shard's rows from `start` on."""
    try:
        before, now = ContentsRows(dump.read(whole_step)), ContentsRows(dump.read(shard))
    except StagescopeError:
        return False
    return rows_start_at(before, now, start)

"""Which rows of a step belong to one sample; the id alone is not sufficient.

Ids should be unique in a step. If each rank (or microbatch) numbers its rows from 0, one id names
several samples, and counting by id would lose all but one. Rows that share an id are therefore
compared by content: the positions of model tokens, the rollout's log-probs, the token ids. They are

* copies, if the content agrees, even if one has more left padding than the other,
* pieces of one sample, if their positions differ,
* a **contradiction**, if they have the same positions with different content.

Rows with other log-probs or another mask are still copies if their parts agree in all rows that
they share by id. They must have the same token ids, or rollout log-probs, wherever both have them.

The samples of a contradicted id are distinguished by owner (the ranks that hold the same rows, see
`PartRecord.group`), and within an owner by part. Each gets a distinct name. Copies of a sample may
differ in p: replicas recompute it, and a later epoch has other weights.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from stagescope_service.statistics.part import GroupKey, PartRecord
from stagescope_service.statistics.row_content import (
    PartRows,
    Row,
    SharedRows,
    are_copies,
    contradict,
    owner_of,
)
from stagescope_service.statistics.summary import Summary
from stagescope_wire.schema import PART_FIELDS, Part


@dataclasses.dataclass(frozen=True)
class RowIdentity:
    """The sample and positions for which a row counts.

    Attributes:
        sample: the name of its sample.
        shift: an offset to add to its positions, since copies may differ in left padding.
        dropped: whether it does not count, since it contradicts the row that it was declared to
            replicate.
    """

    sample: str
    shift: int = 0
    dropped: bool = False


class Contradiction(NamedTuple):
    """An id that names several samples of a step; `holders` are the (role, rank) of each."""

    sample: str
    holders: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Identities:
    """The rows that do not count under their own id.

    Attributes:
        rows: part key -> row -> its identity; an absent row counts under its own id.
        contradictions: by id.
        owners: owner of contradicted ids -> the owner that represents all with the same rows.
    """

    rows: Mapping[str, Mapping[int, RowIdentity]]
    contradictions: tuple[Contradiction, ...]
    owners: Mapping[GroupKey, GroupKey]

    def of_rows(self, key: str, summary: Summary) -> list[RowIdentity]:
        """Return the identity of each of a part's sequences."""
        sequences, own = summary.sequences, self.rows.get(key, {})
        if not own:
            return [RowIdentity(sample) for sample in sequences.samples]
        return [
            own.get(row) or RowIdentity(sample)
            for row, sample in zip(sequences.row.tolist(), sequences.samples, strict=True)
        ]

    def renamed(self, key: str, summary: Summary) -> Summary:
        """Return a part's summary with the names under which its samples count."""
        if key not in self.rows:
            return summary
        names = tuple(row.sample for row in self.of_rows(key, summary))
        sequences = dataclasses.replace(summary.sequences, samples=names)
        return dataclasses.replace(summary, sequences=sequences)


def empty_samples(records: Sequence[PartRecord], identities: Identities) -> tuple[str, ...]:
    """Return the samples without a model token in any part, including parts that do not count.

    A resampling pass may repeat all rows that have tokens and add one without tokens.
    """
    known = {sample for record in records for sample in record.full_summary.sequences.samples}
    whole = _Whole(records, {found.sample for found in identities.contradictions})
    own: dict[object, set[str]] = {}
    for record in records:
        owner = identities.owners.get(owner_of(record))
        if owner is not None:
            own.setdefault(owner, set()).update(record.full_summary.sequences.samples)
    found: dict[str, None] = {}
    for record in sorted(records, key=lambda record: record.order):
        owner = identities.owners.get(owner_of(record))
        has_tokens = known if owner is None else own[owner]
        where = "" if owner is None else f" [{record.role} {owner[-1]}]"
        for name in record.full_summary.empty_samples:
            if name not in has_tokens:
                found[f"{name}{where}"] = None
            elif owner is None and whole.is_another_sample(record, name):
                found[f"{name} [{record.role} {owner_of(record)[-1]}]"] = None
    return tuple(sorted(found))


class _Whole:
    """Which ranks hold whole samples of their own: no copies, and no pieces at known positions."""

    def __init__(self, records: Sequence[PartRecord], contradicted: set[str]) -> None:
        self._owner_of: dict[tuple[str, str], GroupKey] = {}
        """(role, sample) -> the owner that has its tokens."""
        self._pieces: set[str] = set()
        self._shares: set[str] = set()
        """Roles in which several owners hold one sample: their ids name the same samples."""
        for record in records:
            sequences = record.full_summary.sequences
            if record.cp_rank is not None or sequences.placed[:, 0].any():
                self._pieces.update(sequences.samples)
            owner = owner_of(record)
            for sample in sequences.samples:
                first = self._owner_of.setdefault((record.role, sample), owner)
                if first != owner and sample not in contradicted:
                    self._shares.add(record.role)

    def is_another_sample(self, record: PartRecord, name: str) -> bool:
        """Return whether a row without a model token is another sample than the rows of its id."""
        holder = self._owner_of.get((record.role, name), owner_of(record))
        is_piece = name in self._pieces or record.cp_rank is not None
        return holder != owner_of(record) and not is_piece and record.role not in self._shares


def resolve(records: Iterable[PartRecord]) -> Identities:
    """Determine which rows belong to one sample.

    Args:
        records: parts of one stage and pair that name their samples.
    """
    ordered = sorted(records, key=lambda record: record.order)
    counts = Counter[str]()
    for record in ordered:
        counts.update(record.full_summary.sequences.samples)
    by_sample: dict[str, list[Row]] = {}
    for record in ordered:
        rows = PartRows(record)
        for index, sample in enumerate(rows.samples):
            if counts[sample] > 1:
                by_sample.setdefault(sample, []).append(Row(rows, index))
    return _Resolution(by_sample).identities()


@dataclasses.dataclass
class _Version:
    """One of the samples that share an id."""

    owner: GroupKey
    rows: list[Row]


class _Resolution:
    """Groups the rows of each id by content, finds contradictions, and names the samples."""

    def __init__(self, by_sample: Mapping[str, list[Row]]) -> None:
        self._by_sample = by_sample
        self._shared = SharedRows(by_sample)
        self._first: list[Row] = []
        """The first row of each content."""
        self._contradicted: dict[str, bool] = {}
        for sample, rows in by_sample.items():
            self._contradicted[sample] = self._group_by_content(rows)
        self._owners = {
            row.rows.owner: None
            for sample, rows in by_sample.items()
            if self._contradicted[sample]
            for row in rows
        }
        self._canonical = self._replicas()
        self._rows: dict[str, dict[int, RowIdentity]] = {}

    def identities(self) -> Identities:
        contradictions = []
        for sample, rows in self._by_sample.items():
            versions = self._versions(sample, rows)
            self._assign(sample, versions)
            if self._contradicted[sample] and len(versions) > 1:
                records = [version.rows[0].rows.record for version in versions]
                holders = dict.fromkeys((record.role, record.rank) for record in records)
                contradictions.append(Contradiction(sample, tuple(holders)))
        found = tuple(sorted(contradictions, key=lambda it: it.sample))
        return Identities(self._rows, found, self._canonical)

    def _group_by_content(self, rows: Sequence[Row]) -> bool:
        """Set each row's content index; return whether two rows contradict each other."""
        contents: dict[tuple[str, bytes], list[int]] = {}
        parts: dict[str, list[Row]] = {}
        for row in rows:
            part = row.part_of_sample
            candidates = contents.setdefault((part, row.runs), [])
            found = next((c for c in candidates if self._are_copies(self._first[c], row)), None)
            if found is None:
                found = len(self._first)
                self._first.append(row)
                candidates.append(found)
                parts.setdefault(part, []).append(row)
            row.content = found
        return any(self._any_contradicts(found) for found in parts.values() if len(found) > 1)

    def _are_copies(self, one: Row, other: Row) -> bool:
        """Return whether rows with the same runs of model tokens are copies."""
        if are_copies(one, other):
            return True
        return one.first == other.first and self._shared.are_same(one, other)

    def _contradicts(self, one: Row, other: Row, *, doubted: bool = False) -> bool:
        found = contradict(one, other, doubted=doubted)
        return found and not self._shared.are_same(one, other)

    def _any_contradicts(self, rows: Sequence[Row]) -> bool:
        """Return whether two of these rows of one id contradict each other."""
        reaching: list[tuple[int, Row]] = []
        for row in sorted(rows, key=lambda row: row.first):
            reaching = [(last, other) for last, other in reaching if last > row.first]
            if any(self._contradicts(other, row) for _, other in reaching):
                return True
            reaching.append((int(row.intervals[:, 1].max(initial=row.first)), row))
        return False

    def _replicas(self) -> dict[GroupKey, GroupKey]:
        """Map each owner of contradicted ids to the one that represents all with the same rows.

        Ranks not declared as replicas are replicas if most of their rows are the same.
        """
        keys: dict[GroupKey, list[int]] = {owner: [] for owner in self._owners}
        for rows in self._by_sample.values():
            for row in rows:
                if row.rows.owner in keys:
                    keys[row.rows.owner].append(row.content)
        canonical: dict[GroupKey, GroupKey] = {}
        holder: dict[int, GroupKey] = {}
        for owner, contents in keys.items():
            distinct = set(contents)
            shared = Counter(holder[content] for content in distinct if content in holder)
            best, count = shared.most_common(1)[0] if shared else (owner, 0)
            canonical[owner] = best if 2 * count > len(distinct) else owner
            for content in distinct:
                holder.setdefault(content, canonical[owner])
        return canonical

    def _versions(self, sample: str, rows: Sequence[Row]) -> list[_Version]:
        """Return the samples that share an id."""
        owners = {self._canonical[row.rows.owner] for row in rows if row.rows.owner in self._owners}
        if len(owners) < 2 and not self._contradicted[sample]:
            return [_Version((), list(rows))]
        versions: list[_Version] = []
        by_content: dict[tuple[GroupKey | None, int], _Version] = {}
        by_part: dict[tuple[GroupKey, Part | None], _Version] = {}
        for row in rows:
            owner = self._canonical.get(row.rows.owner, row.rows.owner)
            of_part = by_part.get((owner, row.part)), by_part.get((owner, None))
            version = by_content.get((owner, row.content))
            if version is None and row.rows.owner not in self._owners:
                version = by_content.get((None, row.content))
            if version is None:
                version = next((v for v in of_part if v is not None and self._fits(row, v)), None)
            if version is None and of_part[0] is not None and _is_declared_replica(row, of_part[0]):
                version, row.dropped = of_part[0], True
            if version is None:
                version = _Version(owner, [])
                versions.append(version)
            version.rows.append(row)
            if not row.dropped:
                by_content[owner, row.content] = version
                by_content.setdefault((None, row.content), version)
            by_part.setdefault((owner, row.part), version)
            by_part[owner, None] = version
        return versions

    def _fits(self, row: Row, version: _Version) -> bool:
        """Return whether a row can be a piece of a sample."""
        contents = {piece.content for piece in version.rows if not piece.dropped}
        pieces = [self._first[content] for content in contents]
        return not any(
            self._contradicts(piece, row, doubted=True)
            for piece in pieces
            if piece.part_of_sample == row.part_of_sample
        )

    def _assign(self, sample: str, versions: Sequence[_Version]) -> None:
        counts = Counter(version.owner for version in versions)
        used: set[str] = set()
        for version in versions:
            name = sample
            if len(versions) > 1:
                name = unique = _label(sample, version, with_part=counts[version.owner] > 1)
                number = 1
                while unique in used:
                    number += 1
                    unique = f"{name} #{number}"
                name = unique
            used.add(name)
            for row in version.rows:
                identity = RowIdentity(
                    name, self._first[row.content].first - row.first, row.dropped
                )
                if identity != RowIdentity(sample):
                    own = self._rows.setdefault(row.rows.record.key, {})
                    own[row.rows.row[row.index]] = identity


def _is_declared_replica(row: Row, version: _Version) -> bool:
    """Return whether a row's rank is a declared replica of a rank of this sample."""
    mine = row.rows.record
    return any(
        other.rows.record.group == mine.group
        and other.part == row.part
        and other.rows.record.rank != mine.rank
        for other in version.rows
    )


def _label(sample: str, version: _Version, *, with_part: bool) -> str:
    record = version.rows[0].rows.record
    where = f"{record.role} {record.rank}"
    if with_part:
        numbers = {name: getattr(record.part, name) for name in PART_FIELDS}
        where += "".join(f", {name} {number}" for name, number in numbers.items() if number)
    return f"{sample} [{where}]"

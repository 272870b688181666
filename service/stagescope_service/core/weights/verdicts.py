"""Comparison of weights: trainer with rollout by name, replicas with each other.

Pure: records of one version in, verdicts out. A checksum is bit-exact: two tensors agree or differ,
without a tolerance. Tensors that checksums cannot decide (another dtype or shape, fused, quantised,
another shard) are `not comparable`, and never agree.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_wire.schema import WEIGHT_KINDS

AGREES, DIFFERS, MISSING = "agrees", "differs", "missing"
NOT_COMPARABLE, NOT_COMPARED = "not comparable", "not compared"
VERDICTS: Final = (DIFFERS, MISSING, NOT_COMPARABLE, NOT_COMPARED, AGREES)
"""The worst first; `not compared`: the other side has recorded nothing of this version."""

COPY, TP_COPY = "copy", "tp copy"
_COORDINATES: Final = ("tp", "pp", "ep", "etp")
"""Ranks that differ in one of these hold other parameters, or other parts of them."""

Rename = Callable[[str], str]


class Shard(NamedTuple):
    """The position of a DTensor's local part in the full tensor."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    placement: str
    dims: tuple[str, ...]


class WeightTensor(NamedTuple):
    """The metadata of one weight on a rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Shard | str | None


@dataclasses.dataclass(frozen=True, slots=True)
class WeightRecord:
    """The weights that one rank recorded in one call."""

    role: str
    rank: int
    side: str
    kind: str
    version: int
    step: int | None
    #: If a rank has two records, the later one counts.
    order: tuple[float, str, int]
    tensors: Sequence[WeightTensor]
    checksums: Sequence[int | None]
    layout: Mapping[str, object]

    @property
    def coordinates(self) -> tuple[object, ...]:
        """Return this rank's coordinate in each kind of parallelism that shards a model."""
        return tuple(self.layout.get(f"{name}_rank") for name in _COORDINATES)


class Comparison(NamedTuple):
    """The result of comparing one weight."""

    name: str
    kind: str
    verdict: str
    reason: str
    trainer: WeightTensor | None
    rollout: WeightTensor | None
    trainer_checksum: int | None
    rollout_checksum: int | None
    ranks: tuple[int, ...]
    """The rollout ranks that differ from the trainer."""


class DivergingRank(NamedTuple):
    """A rank whose weights differ from its replicas."""

    side: str
    role: str
    rank: int
    is_outvoted: bool
    """Most of its replicas agree on something else; False: there is no majority."""
    replicas: int
    names: tuple[str, ...]


class _Holding(NamedTuple):
    """One value of a weight, and the ranks that hold it."""

    tensor: WeightTensor
    checksum: int | None
    coordinates: tuple[object, ...]
    ranks: list[int]


class _ReplicaGroup(NamedTuple):
    """A weight that its replicas must hold alike."""

    side: str
    role: str
    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    place: object


class _SameRecord(NamedTuple):
    """A record that ranks have in common."""

    side: str
    role: str
    kind: str
    where: tuple[object, ...]
    tensors: tuple[WeightTensor, ...]
    checksums: tuple[int | None, ...]


def newest(records: Iterable[WeightRecord]) -> list[WeightRecord]:
    """Return the newest record of each rank, side and kind, in order of rank."""
    found: dict[tuple[str, str, int, str], WeightRecord] = {}
    for record in records:
        key = (record.side, record.role, record.rank, record.kind)
        if key not in found or found[key].order < record.order:
            found[key] = record
    return [found[key] for key in sorted(found)]


# --- replicas ---------------------------------------------------------------------------------


def odd_replicas(records: Sequence[WeightRecord]) -> list[DivergingRank]:
    """Compare the replicas of one side; return the diverging ranks.

    A rank diverges if its value differs from the majority (more than half) of the tensor's
    replicas. Without a majority all of them diverge.
    """
    groups: dict[_ReplicaGroup, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for holding, side, role, kind in _alike(records):
        place = _replica_key(holding)
        if place is None or holding.checksum is None:
            continue
        tensor = holding.tensor
        key = _ReplicaGroup(side, role, kind, tensor.name, tensor.dtype, tensor.shape, place)
        groups[key][holding.checksum].update(holding.ranks)
    found: dict[tuple[str, str, int], list[tuple[bool, int, str]]] = defaultdict(list)
    for group, values in groups.items():
        if len(values) < 2:
            continue
        count = sum(map(len, values.values()))
        majority = next((ranks for ranks in values.values() if 2 * len(ranks) > count), set[int]())
        for ranks in values.values():
            for rank in ranks if ranks is not majority else ():
                found[group.side, group.role, rank].append((bool(majority), count, group.name))
    return [_odd(*key, found[key]) for key in sorted(found)]


def _odd(
    side: str, role: str, rank: int, reports: Sequence[tuple[bool, int, str]]
) -> DivergingRank:
    is_outvoted = any(outvoted for outvoted, _, _ in reports)
    kept = [each for each in reports if each[0] == is_outvoted]
    names = tuple(sorted({name for _, _, name in kept}))
    return DivergingRank(side, role, rank, is_outvoted, max(count for _, count, _ in kept), names)


def _replica_key(holding: _Holding) -> object:
    """Return the key that replicas of a tensor share; None if it is unknown.

    A tensor without a shard has replicas only if the layout shows that the ranks differ in
    `dp_rank`; otherwise each rank may hold its own part.
    """
    shard, (*here, has_dp) = holding.tensor.shard, holding.coordinates
    tp, pp, ep, etp = here
    if shard == COPY:
        return COPY
    if shard == TP_COPY:
        return (TP_COPY, pp, ep) if has_dp or tp is not None else None
    if isinstance(shard, Shard):
        own = [at for name, at in zip(_COORDINATES, here, strict=True) if name not in shard.dims]
        where = shard.placement if shard.offsets is None else shard.offsets
        return (shard.shape, where, *own)
    return (tp, pp, ep, etp) if has_dp else None


def _alike(records: Sequence[WeightRecord]) -> Iterable[tuple[_Holding, str, str, str]]:
    """Yield each weight of each record; ranks with identical records count once."""
    groups: dict[_SameRecord, list[int]] = defaultdict(list)
    for record in records:
        where = (*record.coordinates, record.layout.get("dp_rank") is not None)
        tensors, checksums = tuple(record.tensors), tuple(record.checksums)
        same = _SameRecord(record.side, record.role, record.kind, where, tensors, checksums)
        groups[same].append(record.rank)
    for same, ranks in groups.items():
        for tensor, checksum in zip(same.tensors, same.checksums, strict=True):
            yield _Holding(tensor, checksum, same.where, ranks), same.side, same.role, same.kind


# --- trainer against rollout ------------------------------------------------------------------


def compare(records: Sequence[WeightRecord], rename: Rename = str) -> list[Comparison]:
    """Compare what the rollout received with what the trainer sent, by name; the worst first.

    Args:
        records: of one version, one for each rank, side and kind (see `newest`).
        rename: maps the names of both sides to the names that are compared.
    """
    by_kind: dict[str, dict[str, dict[str, list[_Holding]]]] = {
        kind: {"trainer": defaultdict(list), "rollout": defaultdict(list)} for kind in WEIGHT_KINDS
    }
    trained = {record.role for record in records if record.side == "trainer"}
    for holding, side, role, kind in _alike(records):
        # A critic's layers have the actor's names, and are sent to no engine.
        if side == "trainer" and "actor" in trained and role != "actor":
            continue
        by_kind[kind][side][rename(holding.tensor.name)].append(holding)
    sides = {side for names in by_kind.values() for side in names if names[side]}
    shared = [k for k in WEIGHT_KINDS if by_kind[k]["trainer"] and by_kind[k]["rollout"]]
    if len(sides) == 2 and not shared:
        return _of_unlike_kinds(by_kind)
    found = [
        _compared(
            name, kind, by_kind[kind]["trainer"].get(name), by_kind[kind]["rollout"].get(name)
        )
        if len(sides) == 2
        else _one_sided(name, kind, by_kind[kind])
        for kind in shared or WEIGHT_KINDS
        for name in sorted({*by_kind[kind]["trainer"], *by_kind[kind]["rollout"]})
    ]
    return sorted(found, key=lambda each: (VERDICTS.index(each.verdict), each.name, each.kind))


def _of_unlike_kinds(
    by_kind: Mapping[str, Mapping[str, Mapping[str, Sequence[_Holding]]]],
) -> list[Comparison]:
    reason = "one side recorded what was exchanged, the other what it holds"
    names = {
        name: (kind, holdings[0], side)
        for kind, sides in by_kind.items()
        for side, held in sides.items()
        for name, holdings in held.items()
    }
    return [
        _answer(name, kind, NOT_COMPARABLE, reason, **{side: holding})
        for name, (kind, holding, side) in sorted(names.items())
    ]


def _one_sided(
    name: str, kind: str, sides: Mapping[str, Mapping[str, list[_Holding]]]
) -> Comparison:
    side = "trainer" if sides["trainer"] else "rollout"
    other = "rollout" if sides["trainer"] else "trainer"
    reason = f"the {other} has recorded nothing of this version"
    return _answer(name, kind, NOT_COMPARED, reason, **{side: sides[side][name][0]})


def _compared(
    name: str, kind: str, trainer: list[_Holding] | None, rollout: list[_Holding] | None
) -> Comparison:
    if trainer is None or rollout is None:
        side, found = ("trainer", rollout) if trainer is None else ("rollout", trainer)
        assert found is not None
        other = "rollout" if trainer is None else "trainer"
        return _answer(name, kind, MISSING, f"not in the {side}", **{other: found[0]})
    for side, found in (("trainer", trainer), ("rollout", rollout)):
        if reason := _not_one(side, found):
            return _answer(name, kind, NOT_COMPARABLE, reason, trainer[0], rollout[0])
    worst: Comparison | None = None
    differing: set[int] = set()
    for received in rollout:
        verdict, reason, sent = _against(received, trainer)
        if verdict == DIFFERS:
            differing.update(received.ranks)
        each = _answer(name, kind, verdict, reason, sent, received)
        if worst is None or VERDICTS.index(verdict) < VERDICTS.index(worst.verdict):
            worst = each
    assert worst is not None
    return worst._replace(ranks=tuple(sorted(differing)))


def _not_one(side: str, holdings: Sequence[_Holding]) -> str:
    """Return why several values of one name are not one weight; empty if they are."""
    names = sorted({holding.tensor.name for holding in holdings})
    if len(names) > 1:
        return f"fused: {', '.join(names[:4])} of the {side} have one name"
    if any(holding.checksum is None for holding in holdings):
        return f"the {side} has no checksum of it"
    by_replica: dict[tuple[object, ...], set[object]] = defaultdict(set)
    for holding in holdings:
        if holding.tensor.shard in (None, TP_COPY):
            by_replica[holding.coordinates].add((holding.tensor[1:3], holding.checksum))
    if len({frozenset(values) for values in by_replica.values()}) > 1:
        return f"each rank of the {side} holds a part of its own"
    return ""


def _against(received: _Holding, trainer: Sequence[_Holding]) -> tuple[str, str, _Holding]:
    cut = [sent for sent in trainer if _cut(sent.tensor) == _cut(received.tensor)]
    if not cut:
        return NOT_COMPARABLE, "the two sides are cut up otherwise", trainer[0]
    form = received.tensor[1:3]
    alike = [sent for sent in cut if sent.tensor[1:3] == form]
    if not alike:
        return (
            NOT_COMPARABLE,
            f"{_describe(cut[0])} was sent, {_describe(received)} received",
            cut[0],
        )
    same = [sent for sent in alike if sent.checksum == received.checksum]
    return (AGREES, "", same[0]) if same else (DIFFERS, "", alike[0])


def _cut(tensor: WeightTensor) -> object:
    """Return which part of the full tensor this is; None: all of it."""
    shard = tensor.shard
    if not isinstance(shard, Shard) or (shard.shape == tensor.shape and shard.offsets is not None):
        return None
    return (shard.shape, shard.placement if shard.offsets is None else shard.offsets, tensor.shape)


def _describe(holding: _Holding) -> str:
    return f"{holding.tensor.dtype}[{', '.join(map(str, holding.tensor.shape))}]"


def _answer(
    name: str,
    kind: str,
    verdict: str,
    reason: str,
    trainer: _Holding | None = None,
    rollout: _Holding | None = None,
) -> Comparison:
    return Comparison(
        name,
        kind,
        verdict,
        reason,
        None if trainer is None else trainer.tensor,
        None if rollout is None else rollout.tensor,
        None if trainer is None else trainer.checksum,
        None if rollout is None else rollout.checksum,
        (),
    )

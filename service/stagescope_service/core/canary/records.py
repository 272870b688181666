"""Records of a canary between the wire and the catalogue, and what one version's records say."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from stagescope_service.core.catalogue_rows import plain, row_id, text
from stagescope_service.core.entities import Process
from stagescope_service.core.instructions import Put
from stagescope_wire.canary import Arm, Canary, Check
from stagescope_wire.errors import InvalidEvent
from stagescope_wire.schema import Event, Work

if TYPE_CHECKING:
    from stagescope_service.store.tables import CanaryRow


JUMP: Final = "canary_jump"
"""The kind of finding of an engine whose log-probs of the canary are not what they should be;
`cause` in its evidence says why."""


class CanaryRecord(NamedTuple):
    """What one side reported in one call."""

    canary: Canary
    step: int | None
    role: str
    rank: int
    order: tuple[float, str, int]
    """Of several records, the later one counts."""


def read(event: Event, work: Work) -> Canary:
    """Read a CANARY event.

    Raises:
        InvalidEvent: a field cannot be read.
    """
    if work.policy_version is None:
        raise InvalidEvent(f"canary event {event.seq} has no policy_version", expected="an int")
    return Canary.parse(event.fields)


def put(process: Process, event: Event, work: Work, canary: Canary) -> Put:
    """Return the row of a record."""
    arms = {name: arm.wire() for name, arm in canary.arms.items()}
    return Put(
        "canaries",
        {
            "incarnation": process.incarnation,
            "seq": event.seq,
            "attempt_id": process.attempt_id,
            "step": work.step,
            "version": work.policy_version,
            "side": canary.side,
            "source": text(canary.source),
            "role": process.role,
            "rank": process.rank,
            "wall": event.wall,
            "arms": zlib.compress(json.dumps(arms, separators=(",", ":")).encode()),
            "checks": plain([list(each) for each in canary.checks]),
            "settings": plain(canary.settings),
            "seconds": canary.seconds if canary.seconds >= 0.0 else None,
            "problem": text(canary.problem),
        },
    )


def record_of(row: CanaryRow) -> CanaryRecord:
    """Return the record of a row."""
    arms = json.loads(zlib.decompress(row["arms"])).items()
    canary = Canary(
        side="trainer" if row["side"] == "trainer" else "engine",
        source=row["source"],
        arms={name: _arm(arm["rows"], arm["log_probs"]) for name, arm in arms},
        checks=tuple(Check(*each) for each in row["checks"]),
        settings=row["settings"],
        seconds=math.nan if row["seconds"] is None else row["seconds"],
        problem=row["problem"],
    )
    order = (row["wall"], row["incarnation"], row["seq"])
    return CanaryRecord(canary, row["step"], row["role"], row["rank"], order)


def _arm(rows: list[list[int]], log_probs: list[list[float]]) -> Arm:
    return Arm(tuple(map(tuple, rows)), tuple(map(tuple, log_probs)))


class Scores:
    """The records of one side, and of one engine instance, about one version.

    Args:
        records: at least one.
    """

    def __init__(self, records: Iterable[CanaryRecord]) -> None:
        self._records = sorted(records, key=lambda each: each.order, reverse=True)

    @property
    def newest(self) -> CanaryRecord:
        """The newest record."""
        return self._records[0]

    @property
    def settings(self) -> Mapping[str, object]:
        """The settings of the newest record."""
        return self.newest.canary.settings

    def arm(self, name: str) -> Arm | None:
        """Return an arm of the newest record that has it."""
        found = self.arms(name)
        return found[0] if found else None

    def arms(self, *names: str) -> Sequence[Arm]:
        """Return arms of the newest record that has all of them; empty: none has."""
        for record in self._records:
            arms = record.canary.arms
            if all(name in arms for name in names):
                return [arms[name] for name in names]
        return []


class VersionScores(NamedTuple):
    """The records of one version."""

    trainer: Scores | None
    engines: Mapping[str, Scores]
    """By the engine instance's name, in its order."""
    step: int | None
    wall: float
    records: int


def scores_of(records: Sequence[CanaryRecord]) -> VersionScores:
    """Return the records of a version, of which there is at least one, by side and engine."""
    trainer = [each for each in records if each.canary.side == "trainer"]
    engines: dict[str, list[CanaryRecord]] = defaultdict(list)
    for each in records:
        if each.canary.side == "engine":
            engines[each.canary.source].append(each)
    return VersionScores(
        Scores(trainer) if trainer else None,
        {name: Scores(engines[name]) for name in sorted(engines)},
        max((each.step for each in records if each.step is not None), default=None),
        max(each.order[0] for each in records),
        len(records),
    )


def finding_id(attempt_id: int, version: int, source: str, code: str) -> str:
    """Return the id of the finding of a cause in an engine instance."""
    return row_id(JUMP, attempt_id, version, source, code)


def digest(value: object) -> str:
    """Return a short text that equal values share."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()

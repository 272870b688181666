"""Findings of collectives that cannot finish, from the answers to requests for stacks."""

from __future__ import annotations

from typing import Final, NamedTuple

from stagescope_service.core.entities import Attempt
from stagescope_service.core.findings import finding, of_attempt
from stagescope_service.core.hangs.stack_requests import ORDERED, Answers
from stagescope_service.core.instructions import Instruction, Put
from stagescope_service.core.state import State
from stagescope_service.core.steps import took_leave
from stagescope_service.store.tables import FindingRow
from stagescope_wire.collectives.blocked import Member, blocked, is_recording
from stagescope_wire.collectives.records import NONE
from stagescope_wire.collectives.rows import (
    COLLECTIVE_KIND,
    OFF_ADVICE,
    OFF_KIND,
    OFF_MESSAGE,
    BlockedCollective,
    advice_of,
)
from stagescope_wire.links import Link
from stagescope_wire.nonfinite import JsonObject

_PROVEN: Final = ("not entered", "different calls", "circle", "behind")
"""Verdicts that hold although not every rank was asked."""


class _Open(NamedTuple):
    finding_id: str
    wall: float
    """When the records were taken."""
    ranks: frozenset[int]
    """The ranks that waited: the finding is over once one of them goes on."""


class BlockedCollectives:
    """Makes the finding of a role's collectives that cannot finish, and ends it.

    Args:
        state: the coordinator's state.
        min_seconds: a collective in which ranks wait for less is a running one.
    """

    def __init__(self, state: State, min_seconds: float) -> None:
        self._state, self._min_seconds = state, min_seconds
        self._open: dict[tuple[int, str], _Open] = {}

    def adopt(self, row: FindingRow) -> None:
        """Adopt an open finding of an earlier coordinator."""
        rows = (row["evidence"] or {}).get("collectives") or []
        if row["attempt_id"] is not None and row["role"] is not None and rows:
            found = _Open(row["finding_id"], row["last_wall"], _waiting_of(rows[0]))
            self._open[row["attempt_id"], row["role"]] = found

    def check(self, wall: float) -> list[Instruction]:
        """Return the findings of the requests that are finished, and end those that are over."""
        out: list[Instruction] = []
        for key, found in [*self._open.items()]:
            attempt = self._state.attempt(key[0])
            if attempt is None or _went_on(attempt, key[1], found):
                del self._open[key]
                if attempt is not None and (not attempt.over or took_leave(attempt)):
                    out.append(_over(found, wall))
        for answers in self._state.stack_requests.finished():
            attempt = self._state.attempt(answers.attempt_id)
            if attempt is None or attempt.over:
                continue
            for role, members in answers.members.items():
                out += self._judge(attempt, role, members, answers, wall)
        return out

    def _judge(
        self, attempt: Attempt, role: str, members: list[Member], answers: Answers, wall: float
    ) -> list[Instruction]:
        is_ordered = answers.reason == ORDERED
        if not is_recording(members):
            has_groups = any(member.record.state != NONE for member in members)
            return [_off(attempt, role, members, wall)] if has_groups and not is_ordered else []
        rows = [
            row
            for row in blocked(members, role)
            if (row.seconds or 0.0) >= self._min_seconds
            if row.verdict in _PROVEN or not is_ordered
        ]
        if not rows:
            return []
        put = _finding(attempt, role, rows, answers, wall)
        row = {**put.row, "over_wall": None}
        row["first_wall"] = self._state.remember_finding(row["finding_id"], wall)
        out: list[Instruction] = [Put("findings", row)]
        before = self._open.get((attempt.attempt_id, role))
        if before is not None and before.finding_id != row["finding_id"]:
            out.append(_over(before, wall))
        found = _Open(row["finding_id"], answers.wall, _waiting(rows[0]))
        self._open[attempt.attempt_id, role] = found
        return out


def _waiting_of(row: JsonObject) -> frozenset[int]:
    return frozenset(rank for at in row["waiting"] for rank in at["ranks"])


def _waiting(row: BlockedCollective) -> frozenset[int]:
    return frozenset(rank for at in row.waiting for rank in at.ranks)


def _went_on(attempt: Attempt, role: str, found: _Open) -> bool:
    if attempt.over:
        return True
    return any(
        process.finished or process.last_event > found.wall
        for process in attempt.processes.values()
        if process.role == role and process.rank in found.ranks and not process.replaced
    )


def _over(found: _Open, wall: float) -> Put:
    columns = {"over_wall": wall, "last_wall": wall, "severity": "info"}
    return Put("findings", {"finding_id": found.finding_id, **columns})


def _finding(
    attempt: Attempt, role: str, rows: list[BlockedCollective], answers: Answers, wall: float
) -> Put:
    first = rows[0]
    stages = [at.stage for at in first.waiting if at.stage]
    step = _step(attempt, role, _waiting(first))
    waited = f", for {first.seconds:.0f} s" if first.seconds is not None else ""
    return finding(
        COLLECTIVE_KIND,
        f"{first.message}{waited}",
        **of_attempt(attempt, wall),
        severity="error",
        step=step,
        stage=stages[0] if stages else None,
        role=role,
        evidence={"collectives": [row.to_json() for row in rows], "request_id": answers.request_id},
        advice=advice_of(first),
        see=(Link.to_step("stuck", step), Link.to_step("stacks", step)),
    )


def _off(attempt: Attempt, role: str, members: list[Member], wall: float) -> Put:
    step = _step(attempt, role, {member.rank for member in members})
    return finding(
        OFF_KIND,
        f"{OFF_MESSAGE} (role {role})",
        **of_attempt(attempt, wall),
        severity="info",
        step=step,
        role=role,
        advice=OFF_ADVICE,
    )


def _step(attempt: Attempt, role: str, ranks: set[int] | frozenset[int]) -> int | None:
    reached = [
        process.max_step
        for process in attempt.processes.values()
        if process.role == role and process.rank in ranks and process.max_step is not None
    ]
    return max(reached, default=None)

"""Findings of collectives that cannot finish, from the answers to requests for stacks."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, TypeAlias

from stagescope_service.core.entities import Attempt
from stagescope_service.core.findings import finding, of_attempt
from stagescope_service.core.hangs.detection import STUCK_KIND, StuckRules
from stagescope_service.core.hangs.stack_requests import ORDERED, Answers
from stagescope_service.core.instructions import Instruction, Put
from stagescope_service.core.state import State
from stagescope_service.core.steps import stopped_midway
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


_Key: TypeAlias = tuple[int, str]
"""An attempt and a role."""


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
        rules: a collective in which ranks wait for less than `min_seconds` is a running one; where
            no rank is stuck, `first_factor` times as long.
    """

    def __init__(self, state: State, rules: StuckRules) -> None:
        self._state, self._rules = state, rules
        self._open: dict[_Key, _Open] = {}
        self._next: dict[_Key, tuple[float, float]] = {}
        """Role that was asked -> when to ask again, and the pause after that."""

    def adopt(self, row: FindingRow) -> None:
        """Adopt an open finding of an earlier coordinator."""
        rows = (row["evidence"] or {}).get("collectives") or []
        if row["attempt_id"] is not None and row["role"] is not None and rows:
            found = _Open(row["finding_id"], row["last_wall"], _waiting_of(rows[0]))
            self._open[row["attempt_id"], row["role"]] = found

    def asked(self, attempt_id: int, role: str) -> None:
        """Note that a role is asked; it is asked again if its answers do not settle the matter."""
        _, pause = self._next.get((attempt_id, role), (0.0, self._rules.min_seconds))
        self._next[attempt_id, role] = (math.inf, pause)

    def goes_on(self, attempt_id: int) -> None:
        """Note that an attempt is busy: its next quiet time is another one."""
        for key in [key for key in self._next if key[0] == attempt_id]:
            del self._next[key]

    def is_due(
        self, attempt_id: int, role: str, is_stuck: bool, is_quiet: bool, wall: float
    ) -> bool:
        """Return whether to ask a role now.

        Args:
            attempt_id: of the attempt.
            role: of the ranks.
            is_stuck: ranks are stuck; the finding of that asks first.
            is_quiet: no rank is stuck, and the role is quiet.
            wall: Unix seconds.
        """
        if not (is_stuck or is_quiet):
            self._next.pop((attempt_id, role), None)
            return False
        at, _ = self._next.get((attempt_id, role), (wall if is_quiet else math.inf, 0.0))
        return at <= wall

    def check(self, wall: float) -> list[Instruction]:
        """Return the findings of the requests that are finished, and end those that are over."""
        out: list[Instruction] = []
        for attempt_id, _ in [*self._next]:
            known = self._state.attempt(attempt_id)
            if known is None or known.over:
                self.goes_on(attempt_id)
        for key, found in [*self._open.items()]:
            attempt = self._state.attempt(key[0])
            if attempt is None or _went_on(attempt, key[1], found):
                del self._open[key]
                if attempt is not None and not stopped_midway(attempt):
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
        key, is_stuck = (attempt.attempt_id, role), answers.reason == STUCK_KIND
        least = self._rules.min_seconds
        if not (is_stuck or answers.reason == ORDERED):
            least *= self._rules.first_factor
        rows = [
            row
            for row in blocked(members, role)
            if (row.seconds or 0.0) >= least
            if row.verdict in _PROVEN or is_stuck
        ]
        recorded = is_recording(members)
        if recorded and not rows and key in self._next:
            _, pause = self._next[key]
            self._next[key] = (wall + pause, 2 * pause)
        if not recorded and is_stuck and any(each.record.state != NONE for each in members):
            return [_off(attempt, role, members, wall)]
        if not rows:
            return []
        put = _finding(attempt, role, rows, answers, wall)
        row = {**put.row, "over_wall": None}
        row["first_wall"] = self._state.remember_finding(row["finding_id"], wall)
        out: list[Instruction] = [Put("findings", row)]
        before = self._open.get(key)
        if before is not None and before.finding_id != row["finding_id"]:
            out.append(_over(before, wall))
        found = _Open(row["finding_id"], answers.wall, _waiting(rows[0]))
        self._open[key] = found
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
    waited = f" (waiting for {first.seconds:.0f} s)" if first.seconds is not None else ""
    return finding(
        COLLECTIVE_KIND,
        f"{first.message}{waited}",
        **of_attempt(attempt, wall),
        severity="error" if answers.reason == STUCK_KIND else "warning",
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

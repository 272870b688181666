"""Periodic checks for stuck ranks, unresponsive processes and trainings without a closed step.

A stuck rank makes a finding, which is over when the rank goes on. Its stacks, and those of one rank
that is not stuck, are requested once. An unresponsive process makes a finding with the time of its
last contact, which is over at its next contact. Its watchdog's file is read on its node.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from stagescope_service.coordinator.hangs.blocked import BlockedCollectives
from stagescope_service.coordinator.hangs.quiet import QuietTrainings
from stagescope_service.coordinator.hangs.unresponsive import UnresponsiveProcesses
from stagescope_service.core.catalogue_rows import row_id
from stagescope_service.core.entities import Attempt, Process
from stagescope_service.core.findings import finding, of_attempt, of_process
from stagescope_service.core.hangs.detection import (
    BETWEEN,
    GONE,
    LIVE,
    NOT_ENDED,
    STUCK_KIND,
    UNHEARD,
    UNRESPONSIVE_KIND,
    Role,
    Stuck,
    StuckRules,
    judge,
)
from stagescope_service.core.hangs.quiet import QUIET_KIND
from stagescope_service.core.hangs.role_progress import roles
from stagescope_service.core.instructions import Delete, Instruction, Put
from stagescope_service.core.state import State
from stagescope_service.core.steps import stopped_midway
from stagescope_service.store.tables import FindingRow
from stagescope_wire.collectives.rows import COLLECTIVE_KIND
from stagescope_wire.errors import InvalidEvent
from stagescope_wire.links import Link
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.render import counted
from stagescope_wire.schema import Work

QUIET: Final = "quiet"
"""Why collectives are requested of a role in which no rank is stuck."""
MAX_FINDINGS: Final = 64
"""Most for one role and check; `GET /steps/{step}/stuck` lists all of them."""
MAX_ASKED: Final = 8
"""Stuck ranks of a role of which one check requests all threads, besides one that is not stuck."""
MAX_RECORDS: Final = 4096
"""Ranks of a role whose collectives one check requests."""
ANSWER_SECONDS: Final = 30.0


class _Key(NamedTuple):
    """The subject of a finding; rank None: the whole role."""

    attempt_id: int
    step: int | None
    stage: str
    role: str
    rank: int | None


class _Found(NamedTuple):
    """The finding of a stuck rank, and since when (Unix seconds) it counts as stuck."""

    finding_id: str
    overdue: float


class HangWatch:
    """Finds hangs in the state; `check` is cheap and is called often.

    Args:
        state: the coordinator's state.
        rules: decide when a rank is stuck.
        late_seconds: without contact for longer, a process that polls is late.
    """

    def __init__(self, state: State, rules: StuckRules, *, late_seconds: float) -> None:
        self._state = state
        self._rules = rules
        self._silence = UnresponsiveProcesses(
            state, late_seconds=late_seconds, min_seconds=rules.min_seconds
        )
        self._collectives = BlockedCollectives(state, rules)
        self._quiet = QuietTrainings(state)
        self._pause = min(max(rules.min_seconds / 4, 0.25), 5.0)
        self._due = -math.inf
        self._open: dict[_Key, _Found] = {}
        self._silent: dict[str, tuple[int, str]] = {}
        """Incarnation -> its attempt and its finding."""
        self._adopted: dict[str, float] = {}
        """Incarnation with a finding of an earlier coordinator -> time of its last contact."""
        self._began: float | None = None
        """Unix time of the first check."""

    def adopt(self, findings: Iterable[FindingRow]) -> None:
        """Adopt the open findings of an earlier coordinator."""
        for row in findings:
            attempt_id = row["attempt_id"]
            if row["over_wall"] is not None or attempt_id is None:
                continue
            if row["kind"] == STUCK_KIND:
                stage, role = row["stage"], row["role"]
                if stage is not None and role is not None:
                    key = _Key(attempt_id, row["step"], stage, role, row["rank"])
                    self._open[key] = _Found(row["finding_id"], -math.inf)
            elif row["kind"] == COLLECTIVE_KIND:
                self._collectives.adopt(row)
            elif row["kind"] == QUIET_KIND:
                self._quiet.adopt(row)
            elif row["kind"] == UNRESPONSIVE_KIND:
                incarnation = str((row["evidence"] or {}).get("incarnation"))
                self._silent[incarnation] = (attempt_id, row["finding_id"])
                process = self._state.registry.processes.get(incarnation)
                if process is not None:
                    self._adopted[incarnation] = process.last_contact

    def check(self, now: float, wall: float) -> list[Instruction]:
        """Return the instructions of one check.

        Args:
            now: the service's monotonic clock, seconds.
            wall: its Unix time.
        """
        if self._began is None:
            self._began = wall
        out, unanswered = self._state.stack_requests.expire(wall)
        self._silence.unanswered(unanswered, now)
        out += self._collectives.check(wall)
        if now < self._due:
            return out
        self._due = now + self._pause
        out += self._silence.check(now)
        out += self._quiet.check(wall)
        stuck: set[_Key] = set()
        before = self._unheard_since_restart()
        unheard: set[str] = set()
        for attempt in self._state.registry.attempts.values():
            if attempt.over:
                continue
            restarted = self._restarted_roles(attempt)
            silent = [
                process
                for process in self._silence.unresponsive(attempt, now, before)
                if process.role not in restarted
            ]
            unheard |= {process.incarnation for process in silent}
            out += self._fell_silent(attempt, silent[:MAX_FINDINGS], wall)
            if not (attempt.open and self._is_quiet(attempt, wall)):
                self._collectives.goes_on(attempt.attempt_id)
            else:
                out += self._judge(attempt, silent, restarted, wall, stuck)
        return out + self._end(stuck, wall) + self._end_silences(unheard, wall)

    def watchdog(self, incarnation: str, fields: JsonObject, wall: float) -> list[Instruction]:
        """Apply the file of a process's watchdog (the fields of a STACKS event)."""
        self._silence.read(incarnation)
        process = self._state.registry.processes.get(incarnation)
        if process is None:
            return []
        try:
            work = Work.parse(fields)
        except InvalidEvent:  # another program may have written the file
            work = Work(process.max_step, None, None)
        return self._state.watchdog(process, fields, work, wall)

    def _restarted_roles(self, attempt: Attempt) -> Collection[str]:
        """Return the roles that a later attempt of the run also has: they are not expected here."""
        newest = self._state.registry.newest(attempt.run)
        if newest is None or newest is attempt:
            return ()
        return {role for role, _ in newest.by_rank}

    def _is_quiet(self, attempt: Attempt, wall: float) -> bool:
        """Return whether a process was quiet for long; makes the check of a busy attempt cheap."""
        quiet = wall - self._rules.min_seconds
        return any(
            process.last_event < quiet and not (process.finished or process.replaced)
            for process in attempt.processes.values()
        )

    def _judge(
        self,
        attempt: Attempt,
        silent: Sequence[Process],
        restarted: Collection[str],
        wall: float,
        stuck: set[_Key],
    ) -> list[Instruction]:
        out: list[Instruction] = []
        # Events that ranks sent while the service could not receive (full disk, restart) are
        # still on the way; a rank that stays silent is unresponsive, not stuck.
        is_news = wall - self._state.registry.restarts.listening_since > self._silence.seconds
        unheard = {(process.role, process.rank) for process in silent}
        for name, role in roles(attempt, {process.incarnation for process in silent}):
            if name in restarted:
                continue
            found = judge(role, wall, self._rules)[:MAX_FINDINGS]
            out += self._look_again(attempt, name, role, bool(found), wall)
            new: list[Stuck] = []
            for each in found:
                key = _key(attempt, name, each)
                known = key in self._open or key in stuck
                # An unresponsive process makes one finding, in whichever part it is.
                if not known and (not is_news or (name, each.rank) in unheard):
                    continue
                if not known:
                    new.append(each)
                stuck.add(key)
            if new:
                out += self._found(attempt, name, new, role, wall)
        return out

    def _look_again(
        self, attempt: Attempt, name: str, role: Role, is_stuck: bool, wall: float
    ) -> list[Instruction]:
        """Return requests for collectives where the stages alone do not say why a role is quiet.

        One that waits in a collective since a short time only may wait for long. And without a
        history no rank is stuck that is in the same part as the others.
        """
        patience = self._rules.first_factor * self._rules.min_seconds
        is_quiet = not is_stuck and _is_quiet_without_history(role, wall - patience)
        if not self._collectives.is_due(attempt.attempt_id, name, is_stuck, is_quiet, wall):
            return []
        reason = STUCK_KIND if is_stuck else QUIET
        request_id = f"{reason}-{row_id(attempt.attempt_id, name, wall)}"
        return self._ask(attempt, name, [], request_id, wall, reason)

    def _found(
        self, attempt: Attempt, name: str, new: list[Stuck], role: Role, wall: float
    ) -> list[Instruction]:
        """Return findings of newly stuck ranks, and requests for their stacks."""
        first = new[0]
        request_id = f"{STUCK_KIND}-{row_id(attempt.attempt_id, name, first.key, first.rank, wall)}"
        out: list[Instruction] = []
        for each in new:
            put = _finding(attempt, name, each, len(role.positions), wall, request_id)
            row = {**put.row, "over_wall": None}
            row["first_wall"] = self._state.remember_finding(row["finding_id"], wall)
            found = _Found(row["finding_id"], each.since + each.limit.seconds)
            self._open[_key(attempt, name, each)] = found
            out.append(Put("findings", row))
        return out + self._ask(attempt, name, [each.rank for each in new], request_id, wall)

    def _ask(
        self,
        attempt: Attempt,
        role: str,
        stuck: list[int],
        request_id: str,
        wall: float,
        reason: str = STUCK_KIND,
    ) -> list[Instruction]:
        """Return requests for the stacks and collectives of every rank of a role.

        All threads are shown of stuck ranks, and of another rank for comparison.
        """
        live = {
            process.rank: process
            for process in attempt.processes.values()
            if process.role == role and process.live and not process.raw
        }
        whole = [rank for rank in stuck if rank in live][:MAX_ASKED]
        whole += sorted(live.keys() - set(stuck))[:1]
        self._collectives.asked(attempt.attempt_id, role)
        out: list[Instruction] = []
        for rank in [*whole, *sorted(live.keys() - set(whole))][:MAX_RECORDS]:
            out += self._state.stack_requests.ask(
                live[rank], request_id, by=reason, reason=reason, wall=wall,
                seconds=ANSWER_SECONDS, only_training=rank not in whole,
            )  # fmt: skip
        return out

    def _fell_silent(
        self, attempt: Attempt, silent: Sequence[Process], wall: float
    ) -> list[Instruction]:
        """Return findings of processes that have become unresponsive."""
        out: list[Instruction] = []
        for process in silent:
            if process.incarnation in self._silent:
                continue
            put = _silent_finding(attempt, process, self._silence.seconds, wall, self._began)
            row = {**put.row, "over_wall": None}
            row["first_wall"] = self._state.remember_finding(row["finding_id"], wall)
            self._silent[process.incarnation] = (attempt.attempt_id, row["finding_id"])
            out.append(Put("findings", row))
        return out

    def _unheard_since_restart(self) -> set[str]:
        """Return the processes that were unresponsive before the restart and had no contact since.

        The restart renewed their lease without a contact.
        """
        processes = self._state.registry.processes
        for incarnation, heard in [*self._adopted.items()]:
            process = processes.get(incarnation)
            awaited = process is not None and not (process.finished or process.replaced)
            if not awaited or process is None or process.last_contact > heard:
                del self._adopted[incarnation]
        return set(self._adopted)

    def _end_silences(self, unheard: set[str], wall: float) -> list[Instruction]:
        """End the findings of processes that responded, left or were replaced.

        If all processes of a job fell silent together, none held up the others: those are deleted.
        """
        out: list[Instruction] = []
        for incarnation in self._silent.keys() - unheard:
            attempt_id, finding_id = self._silent.pop(incarnation)
            if self._died_with_others(attempt_id, incarnation):
                out.append(Delete("findings", {"finding_id": finding_id}))
            else:
                out += self._over(attempt_id, finding_id, wall)
        return out

    def _died_with_others(self, attempt_id: int, incarnation: str) -> bool:
        attempt, process = self._state.attempt(attempt_id), None
        if attempt is not None and stopped_midway(attempt):
            process = attempt.processes.get(incarnation)
        if attempt is None or process is None:
            return False
        last = max(each.last_contact for each in attempt.processes.values())
        return last - process.last_contact <= self._silence.seconds

    def _end(self, stuck: set[_Key], wall: float) -> list[Instruction]:
        """End the findings of ranks that went on or left.

        If the attempt stopped before a rank counted as stuck, no rank waited for it: its finding
        is deleted.
        """
        out: list[Instruction] = []
        for key in [key for key in self._open if key not in stuck]:
            found = self._open.pop(key)
            if self._stopped_before(key.attempt_id, found.overdue):
                out.append(Delete("findings", {"finding_id": found.finding_id}))
            else:
                out += self._over(key.attempt_id, found.finding_id, wall)
        return out

    def _stopped_before(self, attempt_id: int, overdue: float) -> bool:
        """Return whether all processes of an attempt that ended were last heard before a time."""
        attempt = self._state.attempt(attempt_id)
        if attempt is None or not stopped_midway(attempt):
            return False
        heard = (process.last_contact for process in attempt.processes.values())
        return max(heard, default=math.inf) < overdue

    def _over(self, attempt_id: int, finding_id: str, wall: float) -> list[Instruction]:
        attempt = self._state.attempt(attempt_id)
        if attempt is None or stopped_midway(attempt):
            return []  # it was stuck until it ended
        columns = {"over_wall": wall, "last_wall": wall, "severity": "info"}
        return [Put("findings", {"finding_id": finding_id, **columns})]


def _is_quiet_without_history(role: Role, since: float) -> bool:
    """Return whether every live rank is quiet, and one is in a stage that no earlier step had."""
    live = [position for position in role.positions.values() if position.process == LIVE]
    return any(
        position.inside is not None and not role.history(position.inside.stage).longest
        for position in live
    ) and all(position.last_event is not None and position.last_event < since for position in live)


def _key(attempt: Attempt, role: str, stuck: Stuck) -> _Key:
    rank = None if stuck.whole_role else stuck.rank
    return _Key(attempt.attempt_id, stuck.key.step, stuck.key.stage, role, rank)


def _silent_finding(
    attempt: Attempt, process: Process, limit: float, wall: float, began: float | None
) -> Put:
    spans = [*process.open_spans.values(), *process.unfinished.values()]
    inside = next((span for span in reversed(spans) if span.work.step == process.max_step), None)
    reached = None if process.reached is None else process.reached[2].key
    step, stage, part = process.max_step, None, None
    if inside is not None:
        stage, part = inside.work.stage, str(inside.work.part)
    elif reached is not None:
        step, stage, part = reached.step, reached.stage, str(reached.part)
    place = f"step {step}" if stage is None else f"{stage} of step {step}"
    # Its work since its last report is unknown: it may have ended the stage.
    where = f"after {'the begin of ' if inside else ''}{place}"
    quiet = f"not heard for {max(wall - process.last_contact, 0.0):.0f} s"
    if began is not None and process.last_contact < began:
        # Whether the earlier coordinator had requested its stacks is unknown.
        quiet = (
            f"not heard in the {wall - began:.0f} s since the service restarted (its last event "
            f"came {max(wall - process.last_contact, 0.0):.0f} s ago)"
        )
    return finding(
        UNRESPONSIVE_KIND,
        f"rank {process.rank} of {process.role} does not answer: {quiet}, {where}; others "
        "may wait for it",
        **of_process(attempt, process, wall),
        severity="error",
        step=step,
        stage=stage,
        evidence={
            "status": NOT_ENDED if inside else BETWEEN,
            "part": part,
            "since_wall": process.last_contact,
            "limit_seconds": limit,
            "incarnation": process.incarnation,
            "node_id": process.node_id,
        },
        advice="look at its process on its node (stopped, swapping, a held interpreter lock, a "
        "dead host, a cut network)",
        see=(Link.to_step("stuck", step, shows="host and pid"),),
    )


def _finding(
    attempt: Attempt, role: str, stuck: Stuck, ranks: int, wall: float, request_id: str
) -> Put:
    place, limit = stuck.key, stuck.limit
    who = f"every rank of {role}" if stuck.whole_role else f"rank {stuck.rank} of {role}"
    is_unheard = stuck.process == UNHEARD
    if stuck.process == GONE:
        who += ", whose process stopped reporting,"
    elif is_unheard:
        who += ", which no process reports for,"
    what = f"{who} has {stuck.status} {place.stage} in step {place.step}"
    others = f"{stuck.begun} of {counted(ranks, 'rank')} began it, {stuck.ended} ended it"
    usual = (
        "no earlier step to compare with"
        if limit.usual is None
        else f"usually {limit.usual:.3g} s over {counted(limit.steps, 'step')}"
    )
    asked = (
        "its log says whether it found the service; the stacks"
        if is_unheard
        else "its stacks and collectives and those"
    )
    return finding(
        STUCK_KIND,
        f"{what}: {'awaited' if is_unheard else 'quiet'} for {stuck.seconds:.0f} s ({usual}); "
        f"{others}",
        **of_attempt(attempt, wall),
        severity="error",
        step=place.step,
        stage=place.stage,
        role=role,
        rank=None if stuck.whole_role else stuck.rank,
        evidence={
            "status": stuck.status,
            "process": stuck.process,
            "part": str(place.part),
            "since_wall": stuck.since,
            "seconds": stuck.seconds,
            "limit_seconds": limit.seconds,
            "usual_seconds": limit.usual,
            "history_steps": limit.steps,
            "ranks_begun": stuck.begun,
            "ranks_ended": stuck.ended,
            "request_id": request_id,
        },
        advice=f"{asked} of the other ranks were asked for",
        see=(Link.to_step("stacks", place.step),),
    )

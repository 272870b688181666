"""Capture requests on live runs: requested ranks, their acknowledgements, the start. No I/O.

It reads the state machine's memory and the plan, and returns the rows to write. Only this module
changes the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final, cast

from typing_extensions import Unpack

from stagescope_service.core.captures import agreement as agreement_rules
from stagescope_service.core.captures.active_plan import CaptureEntry, Plan
from stagescope_service.core.captures.agreement import (
    Agreement,
    CaptureParticipants,
    Estimate,
    Gap,
    start_step,
)
from stagescope_service.core.captures.participants import (
    attempt_of,
    check_stages,
    check_to_come,
    is_early,
    names,
    notes,
    participants_of,
    run_of,
    warnings,
)
from stagescope_service.core.findings import FindingWork, finding
from stagescope_service.core.instructions import Put
from stagescope_service.core.state import State
from stagescope_wire.captures import needs_ranks
from stagescope_wire.errors import Conflict
from stagescope_wire.links import Link
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.plan import CaptureSpec

_ESTIMATED: Final = "estimated"
_GAPS: Final = ("missed", "failed", "truncated")
_COST_COLUMNS: Final = ("role", "rank", "step", "stage", "node_id", "error")
_MISSED_LISTED: Final = 200


class CaptureRequests:
    """The plan, and the agreement on its captures.

    Args:
        plan: with the captures of the catalogue.
        state: of the live processes.
    """

    def __init__(self, plan: Plan, state: State) -> None:
        self.plan = plan
        self.state = state
        self._asked_mono: dict[str, float] = {}
        self._acknowledged: dict[str, dict[str, float]] = {}
        """Capture -> incarnation -> seconds until its acknowledgement."""
        self._estimates: dict[str, dict[tuple[str, int, str | None], Estimate]] = {}
        """Capture -> (role, rank, stage) -> its estimate; stored at the agreement."""
        self._interrupted = {
            entry.capture_id for entry in plan.entries.values()
            if entry.agreement.phase == agreement_rules.ASKED
        }  # fmt: skip
        """Asked before a restart: asked again, since the acknowledgements were only in memory."""

    # --- changes --------------------------------------------------------------------------
    def add(self, capture: CaptureSpec, *, by: str, mono: float, wall: float) -> CaptureEntry:
        """Add a request that `validate_capture` returned; `check` continues with it.

        Raises:
            Conflict: the same request is active, all its steps have begun or closed, its steps
                count from the present step and several runs are live, or a stage looks misspelt.
        """
        capture = {**capture, "run": run_of(self.state.registry, capture)}
        attempt = None if capture["run"] is None else self.state.registry.newest(capture["run"])
        check_stages(attempt, capture)
        top = None if attempt is None or attempt.over else attempt.top_step
        steps = capture["steps"]
        begun = isinstance(steps, list) and top is not None and max(steps) <= top
        if begun and not capture["again"]:
            raise Conflict(
                f"step {max(steps)} has begun: the newest is {top}",
                expected="a later step, or 'next'",
            )
        if isinstance(steps, list) and not capture["again"] and not capture["force"]:
            check_to_come(self.state.registry, capture["run"], max(steps))
        entry = self.plan.add(capture, by=by, now=wall, has_passed=self._has_passed)
        self._asked_mono[entry.capture_id] = mono
        return entry

    def _has_passed(self, entry: CaptureEntry) -> bool:
        """Return whether all agreed steps of a capture have begun."""
        agreed = entry.agreement
        last = agreement_rules.last_step(agreed.steps)
        attempt = attempt_of(self.state.registry, entry.request)
        if agreed.phase != agreement_rules.AGREED or last is None or attempt is None:
            return False
        begun = attempt.top_step is not None and attempt.top_step >= last
        return begun and attempt.attempt_id == agreed.attempt_id

    def remove(self, capture_id: str, *, by: str, wall: float) -> tuple[CaptureEntry, list[Put]]:
        """Withdraw a request; a rank that acknowledges the new revision has dropped it.

        Raises:
            NotFound: no such capture is active.
        """
        entry = self.plan.remove(capture_id)
        self._forget(capture_id)
        gone = dataclasses.replace(
            entry.agreement, phase=agreement_rules.WITHDRAWN, revision=self.plan.next_revision()
        )
        entry = CaptureEntry(entry.request, gone)
        return entry, [self.row(entry, removed_wall=wall, removed_by=by)]

    def row(self, entry: CaptureEntry, **columns: object) -> Put:
        """Return the row of a request."""
        return Put(
            "captures",
            {
                "capture_id": entry.capture_id,
                "run": entry.request["run"],
                "spec": entry.stored(),
                "state": entry.agreement.phase,
                "by": entry.request["by"],
                "created_wall": entry.request["created"],
                "revision": entry.agreement.revision,
                **columns,
            },
        )

    # --- reading --------------------------------------------------------------------------
    def check(self, mono: float, wall: float) -> list[Put]:
        """Return the rows since the last call: agreements, ends, findings."""
        out: list[Put] = []
        for entry in [*self.plan.entries.values()]:
            found = self._check_entry(entry, mono, wall)
            if found is None:
                continue
            if found.phase == agreement_rules.AGREED:
                found = dataclasses.replace(found, revision=self.plan.next_revision())
            new = CaptureEntry(entry.request, found)
            if found.phase == agreement_rules.ASKED or found.is_open:
                self.plan.entries[entry.capture_id] = new
                out.append(self.row(new))
            else:
                del self.plan.entries[entry.capture_id]
                self._forget(entry.capture_id)
                out.append(self.row(new, removed_wall=wall, removed_by="service"))
            out += self._findings(new, wall)
        return out

    def _check_entry(self, entry: CaptureEntry, mono: float, wall: float) -> Agreement | None:
        """Return the next agreement; None if nothing changes."""
        agreed = entry.agreement
        if agreed.phase == agreement_rules.ASKED:
            return self._ask(entry, mono, wall)
        attempt = attempt_of(self.state.registry, entry.request)
        if not agreement_rules.is_relative(entry.request["steps"]) or attempt is None:
            return None
        last = agreement_rules.last_step(agreed.steps)
        closed = attempt.last_closed_step
        if attempt.attempt_id == agreed.attempt_id:
            if last is None or closed is None or closed < last:
                return None
            return dataclasses.replace(agreed, phase=agreement_rules.DONE)
        return self._anew(entry, mono, wall)

    def _ask(self, entry: CaptureEntry, mono: float, wall: float) -> Agreement | None:
        request, pending = entry.request, entry.agreement
        if entry.capture_id in self._interrupted:
            self._interrupted.discard(entry.capture_id)
            return self._anew(entry, mono, wall)
        if not needs_ranks(request) or is_early(self.state.registry, request):
            return self._at_once(entry, wall)
        participants = self.participants_of(request)
        elapsed = mono - self._asked_mono.setdefault(entry.capture_id, mono)
        taken = self._acknowledged.setdefault(entry.capture_id, {})
        for member in participants.members:
            if member.incarnation is not None and (member.revision or 0) >= pending.revision:
                taken.setdefault(member.incarnation, elapsed)
        estimates = self._estimates_of(entry, participants)
        trips = [each for each in taken.values() if each <= agreement_rules.MAX_ROUND_TRIP]
        reason = agreement_rules.refusal(request, estimates)
        estimated = dataclasses.replace(pending, estimates=agreement_rules.largest(estimates))
        if reason is not None:
            return dataclasses.replace(estimated, phase=agreement_rules.REFUSED, reason=reason)
        if (
            self._not_estimated(pending, participants, estimates)
            and elapsed < agreement_rules.MAX_ROUND_TRIP
        ):
            return None
        return agreement_rules.check(
            estimated,
            request,
            participants,
            elapsed=elapsed,
            round_trip=max(trips, default=0.0),
            wall=wall,
        )

    def _at_once(self, entry: CaptureEntry, wall: float) -> Agreement | None:
        """Agree without asking: no rank is live, or only the service has something to do.

        None where steps count from the present one and no training has begun any: it waits.
        """
        participants, pending = self.participants_of(entry.request), entry.agreement
        top = participants.top_step
        steps = entry.request["steps"]
        start: int | None = None
        passed: list[int] = []
        # No rank acknowledges it: the least round trip is assumed, for ranks that record a tensor
        # only where it is kept.
        first = 0 if top is None else start_step(top, 0.0, participants.step_seconds)
        if agreement_rules.is_relative(steps) and top is None:
            return None
        if not isinstance(steps, list) and top is not None:
            start = first
            steps, passed = agreement_rules.resolve(steps, start)
        elif isinstance(steps, list) and top is not None:
            # They stay: the parts that are still to come are kept.
            passed = [step for step in steps if step <= top]
            if pending.number > 1:  # a rank has missed one
                start = first
                steps = sorted({start, *steps})
        return dataclasses.replace(
            pending,
            phase=agreement_rules.AGREED,
            attempt_id=participants.attempt_id,
            agreed_wall=wall,
            start=start,
            steps=steps,
            missed_steps=pending.missed_steps if pending.number > 1 else passed,
        )

    def _anew(self, entry: CaptureEntry, mono: float, wall: float) -> Agreement:
        """Ask again: under a new revision, so that old acknowledgements do not count."""
        self._asked_mono[entry.capture_id] = mono
        self._acknowledged.pop(entry.capture_id, None)
        self._estimates.pop(entry.capture_id, None)
        return dataclasses.replace(
            entry.agreement,
            phase=agreement_rules.ASKED,
            revision=self.plan.next_revision(),
            asked_wall=wall,
            steps=None,
            start=None,
            without=[],
            estimates=[],
        )

    # --- what ranks say --------------------------------------------------------------------
    def reported(self, dump: JsonObject, mono: float, wall: float) -> list[Put]:
        """Apply the row of a DUMP event: an estimate, or a rank without a dump of a step."""
        entry = self.plan.entries.get(str(dump["capture_id"]))
        if entry is None:
            return []
        state, phase = dump.get("state"), entry.agreement.phase
        if state == _ESTIMATED and phase == agreement_rules.ASKED:
            cost: JsonObject = {
                **{name: dump.get(name) for name in _COST_COLUMNS}, **(dump.get("estimate") or {}),
            }  # fmt: skip
            key = (dump["role"], dump["rank"], dump.get("stage"))
            self._estimates.setdefault(entry.capture_id, {})[key] = cast("Estimate", cost)
            return []
        if state not in _GAPS or phase != agreement_rules.AGREED:
            return []
        missed: Gap = {
            "role": dump["role"],
            "rank": dump["rank"],
            "step": dump.get("step"),
            "stage": dump.get("stage"),
            "state": state,
        }
        return self._missed(entry, missed, mono, wall)

    def _missed(self, entry: CaptureEntry, gap: Gap, mono: float, wall: float) -> list[Put]:
        agreed = entry.agreement
        if gap in agreed.missed or len(agreed.missed) >= _MISSED_LISTED:
            return []
        agreed = dataclasses.replace(agreed, missed=[*agreed.missed, gap])
        entry = CaptureEntry(entry.request, agreed)
        # Each rank that missed a step says so: one of them has it agreed on again.
        step, start = gap["step"], agreed.start
        is_settled = agreed.number > 1 and step is not None and start is not None and step < start
        if gap["state"] == "missed" and agreed.again_left and not is_settled:
            agreed = dataclasses.replace(
                self._anew(entry, mono, wall),
                number=agreed.number + 1,
                again_left=agreed.again_left - 1,
            )
        new = CaptureEntry(entry.request, agreed)
        self.plan.entries[entry.capture_id] = new
        return [self.row(new), *self._partial(new, gap, wall)]

    # --- who is asked ----------------------------------------------------------------------
    def participants_of(self, request: CaptureSpec) -> CaptureParticipants:
        """Return the requested ranks of a request."""
        return participants_of(self.state.registry, request)

    def notes(self, entry: CaptureEntry) -> list[str]:
        """Return notes for the requester: a request may wait for something that never comes."""
        return notes(self.state.registry, entry)

    def warnings(self, entry: CaptureEntry) -> list[str]:
        """Return those of its notes that are about names that may be misspelt."""
        return warnings(self.state.registry, entry)

    def _estimates_of(
        self, entry: CaptureEntry, participants: CaptureParticipants
    ) -> list[Estimate]:
        """Return the estimates of the requested ranks; ranks without a part in it are left out."""
        members = {(each.role, each.rank) for each in participants.members}
        estimates_by_rank = self._estimates.get(entry.capture_id, {})
        return [
            each for (role, rank, _), each in estimates_by_rank.items() if (role, rank) in members
        ]

    def _not_estimated(
        self,
        pending: Agreement,
        participants: CaptureParticipants,
        estimates: Iterable[Estimate],
    ) -> bool:
        """Return whether a rank has acknowledged and not yet sent its estimate."""
        estimates_by_rank = {(each["role"], each["rank"]) for each in estimates}
        return any(
            (each.role, each.rank) not in estimates_by_rank
            for each in participants.members
            if (each.revision or 0) >= pending.revision
        )

    def _forget(self, capture_id: str) -> None:
        self._asked_mono.pop(capture_id, None)
        self._acknowledged.pop(capture_id, None)
        self._estimates.pop(capture_id, None)
        self._interrupted.discard(capture_id)

    # --- findings --------------------------------------------------------------------------
    def _findings(self, entry: CaptureEntry, wall: float) -> list[Put]:
        agreed = entry.agreement
        if agreed.phase in (
            agreement_rules.GIVEN_UP,
            agreement_rules.TOO_LATE,
            agreement_rules.REFUSED,
        ):
            return [self._finding(entry, "capture_not_started", agreed.reason or "", wall)]
        if agreed.phase == agreement_rules.AGREED and agreed.without:
            text = f"it starts at step {agreed.start} without {names(agreed.without)}"
            return [self._finding(entry, "capture_partial", text, wall, step=agreed.start)]
        return []

    def _partial(self, entry: CaptureEntry, gap: Gap, wall: float) -> list[Put]:
        text = f"{gap['role']} rank {gap['rank']} {gap['state']} {gap['stage']} of it"
        work: FindingWork = {
            "step": gap["step"], "stage": gap["stage"], "role": gap["role"], "rank": gap["rank"],
        }  # fmt: skip
        return [self._finding(entry, "capture_partial", text, wall, **work)]

    def _finding(
        self, entry: CaptureEntry, kind: str, text: str, wall: float, **work: Unpack[FindingWork]
    ) -> Put:
        attempt = attempt_of(self.state.registry, entry.request)
        return finding(
            kind,
            f"capture {entry.capture_id}: {text}",
            run=entry.request["run"],
            attempt_id=None if attempt is None else attempt.attempt_id,
            wall=wall,
            **work,
            evidence={"capture_id": entry.capture_id, "agreement": entry.agreement.number},
            see=(
                Link(
                    "captures",
                    name=entry.capture_id,
                    shows="who acknowledged and who collected",
                ),
            ),
        )

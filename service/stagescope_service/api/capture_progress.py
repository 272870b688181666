"""What each step of a capture came to: who has reported all of it, who did not, who is waited for.

A rank is done with a step once it has reported every ordered stage and part: that is known when
the step is closed, when the rank has begun a later step, or when it has reported what it did in
each of the last steps. Before that a dump that lies there says nothing of those still to come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from stagescope.wire.captures import matches_rank, needs_ranks, unmatched_ranks
from stagescope.wire.schema import PART_FIELDS
from stagescope_service.api import rows as shape
from stagescope_service.api.completeness import ALL_ROWS
from stagescope_service.core.captures import agreement as agreeing
from stagescope_service.core.captures.agreement import Agreement
from stagescope_service.store.catalogue import Catalogue

Row = dict[str, Any]
RoleRank: TypeAlias = tuple[str, int]
Place: TypeAlias = tuple[str, int, int, int, int]
"""A stage and its part."""
Reported: TypeAlias = Mapping[Place, set[str]]
"""Place -> the states of its dumps."""

_COLLECTED: Final = "complete"
_NO_REPORT: Final = "no report"
_STEPS_LISTED: Final = 1000
_WORST: Final = ("failed", "missed", "truncated", "skipped", "armed", _COLLECTED)
"""States of a rank's dumps in a step: the first that is there is what the rank came to."""
_STEPS_BEFORE: Final = 2
"""Closed steps by which it is known what a rank does in a step: they must be alike."""


def captured_steps(
    catalogue: Catalogue,
    spec: Row,
    agreed: Agreement,
    attempt: Row | None,
    dumps: Iterable[Row],
    ranks: Iterable[RoleRank],
) -> list[Row]:
    """Return what each step of a capture came to.

    Args:
        catalogue: the store's reading side.
        spec: the order.
        agreed: how far it is agreed on.
        attempt: the run's newest, None where there is none.
        dumps: of the capture, in every attempt.
        ranks: that the order asks in the newest attempt; they count where the agreement names no
            member, since it was in force before anyone was there to ask.
    """
    by_step: dict[tuple[int, int], dict[RoleRank, dict[Place, set[str]]]] = {}
    for dump in dumps:
        of_step = by_step.setdefault((dump["attempt_id"], dump["step"]), {})
        of_rank = of_step.setdefault((dump["role"], dump["rank"]), defaultdict(set))
        of_rank[_place(dump)].add(dump["state"] or "armed")
    newest = None if attempt is None else int(attempt["attempt_id"])
    if attempt is not None and newest is not None and agreed.phase != agreeing.ASKED:
        collected = {number for _, number in by_step}
        resumed = attempt["resumed_from_step"]
        for number in _listed(agreed.steps):
            if number in collected and resumed is not None and number <= resumed:
                continue  # an earlier attempt did it, and this one never will
            by_step.setdefault((newest, number), {})
    members = {(each["role"], each["rank"]) for each in agreed.members}
    without = {(each["role"], each["rank"]) for each in agreed.without}
    found = []
    for (attempt_id, number), reported in sorted(by_step.items()):
        step = _Step(catalogue, attempt_id, number, spec)
        asked = {*members, *reported}
        if not members and attempt_id == newest and needs_ranks(spec):
            asked |= {*ranks} - without
        if step.closed and asked - reported.keys():
            # Asked before anyone knew which roles do these stages: some have nothing to collect.
            doing = {role for role, _ in step.parts()}
            asked = {each for each in asked if each[0] in doing or each in reported}
        mine = {rank: step.came_to(rank, reported.get(rank, {})) for rank in asked}
        # Who was left out on purpose is named, and not waited for.
        mine |= {rank: ("not asked", True) for rank in without if rank not in reported}
        over = bool(mine) or (step.closed and not needs_ranks(spec))
        found.append({"step": number, "attempt_id": attempt_id, **_tally(mine, over)})
    return found


class _Step:
    """A step that is captured, and what is known of who does what in it."""

    def __init__(self, catalogue: Catalogue, attempt_id: int, number: int, spec: Row) -> None:
        self._catalogue, self._attempt_id, self._number = catalogue, attempt_id, number
        self._names = None if spec["stages"] == "all" else list(spec["stages"])
        rows = catalogue.steps(attempt_id, before=number + 1, limit=_STEPS_BEFORE + 1)
        own = [row for row in rows if row["step"] == number]
        self.closed = bool(own) and own[0]["closed_wall"] is not None
        earlier = [row for row in rows if row["step"] < number and row["closed_wall"] is not None]
        self._before = [int(row["step"]) for row in earlier[:_STEPS_BEFORE]]
        self._done: dict[int, dict[RoleRank, set[Place]]] = {}
        self._parts: dict[RoleRank, int] | None = None
        self._furthest: dict[RoleRank, int] | None = None

    def parts(self) -> Mapping[RoleRank, int]:
        """Return how many parts of the ordered stages each rank did."""
        if self._parts is None:
            self._parts = {}
            counts = self._catalogue.count_stages(self._attempt_id, self._number, stage=self._names)
            for (stage, role, rank), count in counts.items():
                if self._is_ordered(stage):
                    self._parts[role, rank] = self._parts.get((role, rank), 0) + count
        return self._parts

    def came_to(self, rank: RoleRank, reported: Reported) -> tuple[str, bool]:
        """Return what a rank came to, and whether it is done with the step."""
        states = set[str]().union(*reported.values()) if reported else set()
        worst = next((state for state in _WORST if state in states), _NO_REPORT)
        over = self.closed or self._went_on(rank)
        if over and worst in (_COLLECTED, _NO_REPORT):
            return (_NO_REPORT if self.parts().get(rank, 0) > len(reported) else worst), True
        if over:
            return worst, worst != "armed"
        return worst, "armed" not in states and self._has_reported_all(rank, reported)

    def _went_on(self, rank: RoleRank) -> bool:
        if self._furthest is None:
            self._furthest = {}
            for row in self._catalogue.processes(self._attempt_id):
                place = (row["role"], row["rank"])
                step = -1 if row["max_step"] is None else int(row["max_step"])
                self._furthest[place] = max(step, self._furthest.get(place, -1))
        return self._furthest.get(rank, -1) > self._number

    def _has_reported_all(self, rank: RoleRank, reported: Reported) -> bool:
        """Return whether a rank of an open step has reported all that it did in each before it."""
        if not reported or not self._before:
            return False
        usual = [self._places(number).get(rank, set()) for number in self._before]
        begun = self._places(self._number).get(rank, set())
        return all(usual[0] == places for places in usual) and reported.keys() >= {
            *usual[0],
            *begun,
        }

    def _places(self, number: int) -> Mapping[RoleRank, set[Place]]:
        """Return what each rank did of the ordered stages in a step."""
        if number not in self._done:
            found: defaultdict[RoleRank, set[Place]] = defaultdict(set)
            rows = self._catalogue.stages(
                self._attempt_id, number, stage=self._names, limit=ALL_ROWS
            )
            for row in rows:
                if self._is_ordered(row["stage"]):
                    found[row["role"], row["rank"]].add(_place(row))
            self._done[number] = found
        return self._done[number]

    def _is_ordered(self, stage: str) -> bool:
        # 'all' leaves the rollout out: it runs in an inference engine.
        return self._names is not None or stage != "rollout_generate"


def _place(row: Row) -> Place:
    occurrence, epoch, minibatch, microbatch = (int(row[name] or 0) for name in PART_FIELDS)
    return row["stage"], occurrence, epoch, minibatch, microbatch


def _listed(steps: Any) -> list[int]:
    if isinstance(steps, Mapping):
        count = steps.get("count")
        if count is None:
            return []
        start = steps["start"] or 0
        return [start + number * steps["every"] for number in range(min(count, _STEPS_LISTED))]
    return [*(steps or [])][:_STEPS_LISTED] if steps != "all" else []


def _tally(states: Mapping[RoleRank, tuple[str, bool]], over: bool) -> Row:
    done = [rank for rank, (state, final) in states.items() if final and state == _COLLECTED]
    open_ = [rank for rank, (_, final) in states.items() if not final]
    gaps = [
        {"role": role, "rank": rank, "state": state}
        for (role, rank), (state, final) in sorted(states.items())
        if state not in (_COLLECTED, "armed") and (final or state != _NO_REPORT)
    ]
    verdict = "waiting" if open_ or not over else "partial" if gaps else "complete"
    return {
        "state": verdict,
        "collected": len(done),
        "waiting": [{"role": role, "rank": rank} for role, rank in sorted(open_)],
        "gaps": gaps,
    }


def progress(catalogue: Catalogue, row: Row) -> Row:
    """Return a capture's row with its `ranks`, `steps`, `dumps`, and the state they make."""
    spec = row["spec"]
    agreed = Agreement.of(spec.get("agreement") or {})
    attempt = catalogue.find_attempt(row["run"]) if row["run"] is not None else None
    dumps = catalogue.captured(row["capture_id"], limit=ALL_ROWS)
    ranks = _ranks(catalogue, spec, agreed, attempt)
    numbers = {each["attempt_id"]: each["number"] for each in catalogue.attempts(row["run"])}
    asked = [(each["role"], each["rank"]) for each in ranks]
    found = captured_steps(catalogue, spec, agreed, attempt, dumps, asked)
    steps = shape.numbered(found, numbers)
    listed = [
        {"attempt": numbers.get(each["attempt_id"]), "step": each["step"], **shape.dump_row(each)}
        for each in dumps
    ]
    return {
        "capture_id": row["capture_id"],
        "run": row["run"],
        "attempt": None if attempt is None else attempt["number"],
        "state": _state(row, agreed, steps),
        "reason": agreed.reason,
        "order": {name: value for name, value in spec.items() if name != "agreement"},
        "agreement": agreed.fields(),
        "created_wall": row["created_wall"],
        "removed_wall": row["removed_wall"],
        "removed_by": row["removed_by"],
        "ranks": ranks,
        "unmatched_ranks": _unmatched(catalogue, spec, attempt, ranks),
        "steps": steps,
        "dumps": listed,
    }


def _ranks(catalogue: Catalogue, spec: Row, agreed: Agreement, attempt: Row | None) -> list[Row]:
    """Return whom the capture asks, and who has acknowledged its latest revision."""
    asked = {(each["role"], each["rank"]) for each in (*agreed.members, *agreed.without)}
    roles = {role for role, _ in asked} or set(spec["roles"] or ())
    newest: dict[tuple[str, int], Row] = {}
    for process in [] if attempt is None else catalogue.processes(attempt["attempt_id"]):
        role, rank = process["role"], process["rank"]
        idle = process["raw"] or (process["hello"] or {}).get("captures") is False
        if idle or (roles and role not in roles) or not matches_rank(spec["ranks"], rank):
            continue
        known = newest.get((role, rank))
        if known is None or (known["first_wall"] or 0.0) < (process["first_wall"] or 0.0):
            newest[role, rank] = process
        absent = range(process["world_size"] or 0)
        asked |= {(role, each) for each in absent if matches_rank(spec["ranks"], each)}
    found = []
    for role, rank in sorted({*newest, *asked}):
        process = newest.get((role, rank), {})
        there = bool(process) and not (process["finished_wall"] or process["lapsed_wall"])
        came = process.get("first_wall")
        since = agreed.agreed_wall
        found.append(
            {
                "role": role,
                "rank": rank,
                "acknowledged": (process.get("plan_revision") or 0) >= agreed.revision,
                "there": there,
                "joined_later": bool(since and came and came > since),
                "last_wall": process.get("last_wall"),
                "node": process.get("node"),
                "host": process.get("host"),
                "pid": process.get("pid"),
            }
        )
    return found


def _unmatched(
    catalogue: Catalogue, spec: Row, attempt: Row | None, ranks: Iterable[Row]
) -> list[int]:
    """Return the ranks that the order names and that nobody has in the run's newest attempt."""
    if attempt is None:
        return []
    there = {each["rank"] for each in ranks}
    if not needs_ranks(spec):  # what the service does alone it does of raw callers, too
        there |= {each["rank"] for each in catalogue.processes(attempt["attempt_id"])}
    return unmatched_ranks(spec["ranks"], there)


def _state(row: Row, agreed: Agreement, steps: Iterable[Row]) -> str:
    """Return a capture's state: its phase, or what came of it where every step is over."""
    if agreed.phase not in (agreeing.AGREED, agreeing.DONE):
        return agreed.phase
    verdicts = {each["state"] for each in steps}
    over = agreed.phase == agreeing.DONE or agreeing.last_step(agreed.steps) is not None
    if not over or not verdicts or "waiting" in verdicts:
        return agreed.phase
    return "partial" if "partial" in verdicts else "complete"

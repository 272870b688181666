"""How far a capture has come, from the catalogue's rows alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from stagescope.captures import matches_rank
from stagescope_service.api import rows as shape
from stagescope_service.api.completeness import ALL_ROWS
from stagescope_service.engine.orders import agreement as agreeing
from stagescope_service.engine.orders.agreement import Agreement
from stagescope_service.store.catalogue import Catalogue

Row = dict[str, Any]

_COLLECTED: Final = "complete"
_UNDER_WAY: Final = ("armed",)
_STEPS_LISTED: Final = 1000
_WORST: Final = ("failed", "missed", "truncated", "skipped", "armed", "complete")
"""States of a rank's dumps in a step: the first that is there is what the rank came to."""


def progress(catalogue: Catalogue, row: Row) -> Row:
    """Return a capture's row with its `ranks`, `steps`, `dumps`, and the state they make."""
    spec = row["spec"]
    agreed = Agreement.of(spec.get("agreement") or {})
    attempt = catalogue.find_attempt(row["run"]) if row["run"] is not None else None
    dumps = catalogue.captured(row["capture_id"], limit=ALL_ROWS)
    ranks = _ranks(catalogue, spec, agreed, attempt)
    numbers = {each["attempt_id"]: each["number"] for each in catalogue.attempts(row["run"])}
    steps = shape.numbered(_steps(catalogue, agreed, attempt, dumps, spec["stages"]), numbers)
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


def _steps(
    catalogue: Catalogue,
    agreed: Agreement,
    attempt: Row | None,
    dumps: Iterable[Row],
    stages: Any,
) -> list[Row]:
    """Return what each step came to: who collected, who did not, who is waited for."""
    by_place: dict[tuple[int, int], dict[tuple[str, int], set[str]]] = {}
    for dump in dumps:
        ranks = by_place.setdefault((dump["attempt_id"], dump["step"]), defaultdict(set))
        ranks[dump["role"], dump["rank"]].add(dump["state"] or "armed")
    if attempt is not None and agreed.phase != agreeing.ASKED:
        collected = {number for _, number in by_place}
        resumed = attempt["resumed_from_step"]
        for number in _listed(agreed.steps):
            if number in collected and resumed is not None and number <= resumed:
                continue  # an earlier attempt did it, and this one never will
            by_place.setdefault((attempt["attempt_id"], number), defaultdict(set))
    members = {(each["role"], each["rank"]) for each in agreed.members}
    without = {(each["role"], each["rank"]) for each in agreed.without}
    found = []
    for (attempt_id, number), states in sorted(by_place.items()):
        closed = _is_closed(catalogue, attempt_id, number)
        asked = {*members, *states}
        if closed and members - states.keys():
            # Asked before anyone knew which roles do these stages: some have nothing to collect.
            doing = _doing(catalogue, attempt_id, number, stages)
            asked = {each for each in asked if each[0] in doing or each in states}
        mine = {rank: _came_to(states.get(rank, ()), closed) for rank in asked}
        # Who was left out on purpose is named, and not waited for.
        mine |= {rank: "not asked" for rank in without if rank not in states}
        found.append({"step": number, "attempt_id": attempt_id, **_tally(mine)})
    return found


def _doing(catalogue: Catalogue, attempt_id: int, number: int, stages: Any) -> set[str]:
    """Return the roles that did one of the ordered stages in a step."""
    wanted = None if stages == "all" else list(stages)
    rows = catalogue.stages(attempt_id, number, stage=wanted, limit=ALL_ROWS)
    return {row["role"] for row in rows if stages != "all" or row["stage"] != "rollout_generate"}


def _listed(steps: Any) -> list[int]:
    if isinstance(steps, Mapping):
        count = steps.get("count")
        if count is None:
            return []
        start = steps["start"] or 0
        return [start + number * steps["every"] for number in range(min(count, _STEPS_LISTED))]
    return [*(steps or [])][:_STEPS_LISTED] if steps != "all" else []


def _is_closed(catalogue: Catalogue, attempt_id: int, number: int) -> bool:
    found = catalogue.steps(attempt_id, before=number + 1, limit=1)
    return bool(found) and found[0]["step"] == number and found[0]["closed_wall"] is not None


def _came_to(states: Iterable[str], closed: bool) -> str:
    said = set(states)
    if not said:
        return "no report" if closed else "waiting"
    return next((state for state in _WORST if state in said), "waiting")


def _tally(states: Mapping[tuple[str, int], str]) -> Row:
    done = [rank for rank, state in states.items() if state == _COLLECTED]
    open_ = [rank for rank, state in states.items() if state in ("waiting", *_UNDER_WAY)]
    gaps = [
        {"role": role, "rank": rank, "state": state}
        for (role, rank), state in sorted(states.items())
        if state != _COLLECTED and (role, rank) not in open_
    ]
    verdict = "waiting" if open_ or not states else "partial" if gaps else "complete"
    return {
        "state": verdict,
        "collected": len(done),
        "waiting": [{"role": role, "rank": rank} for role, rank in sorted(open_)],
        "gaps": gaps,
    }


def _state(row: Row, agreed: Agreement, steps: Iterable[Row]) -> str:
    """Return a capture's state: its phase, or what came of it where every step is over."""
    if agreed.phase not in (agreeing.AGREED, agreeing.DONE):
        return agreed.phase
    verdicts = {each["state"] for each in steps}
    over = agreed.phase == agreeing.DONE or agreeing.last_step(agreed.steps) is not None
    if not over or not verdicts or "waiting" in verdicts:
        return agreed.phase
    return "partial" if "partial" in verdicts else "complete"

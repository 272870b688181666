"""How far a capture has come, from the catalogue's rows alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stagescope.captures import matches_rank, needs_ranks, unmatched_ranks
from stagescope_service.api import rows as shape
from stagescope_service.api.captured_steps import captured_steps
from stagescope_service.api.completeness import ALL_ROWS
from stagescope_service.core.captures import agreement as agreeing
from stagescope_service.core.captures.agreement import Agreement
from stagescope_service.store.catalogue import Catalogue

Row = dict[str, Any]


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

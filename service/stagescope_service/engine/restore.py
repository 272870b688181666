"""Rebuild the state machine from what the catalogue holds, after a crash or a restart.

Refs do not survive a coordinator: payloads that were announced and not read come back as not in
flight, and are read when their process offers them again, or lost when its lease runs out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagescope.schema import LAYOUT_COLUMNS, PART_FIELDS, Part, Work
from stagescope_service.engine import steps
from stagescope_service.engine.completeness import participants
from stagescope_service.engine.entities import OPEN, Attempt, Payload, Process, Span, Step
from stagescope_service.engine.instructions import PayloadKey
from stagescope_service.engine.state import State
from stagescope_service.store.base import Snapshot


def restore(state: State, snapshot: Snapshot, now: float) -> None:
    """Fill an empty `state`; every live process gets a whole lease to be heard again."""
    registry = state.registry
    registry.reserve(snapshot.last_attempt_id + 1)
    for row in sorted(snapshot.attempts, key=lambda row: row["number"]):
        registry.adopt(_attempt(row))
    for row in snapshot.processes:
        attempt = registry.attempts.get(row["attempt_id"])
        if attempt is not None:
            lease = state.raw_lease_seconds if row["raw"] else state.lease_seconds
            process = _process(row, now + lease)
            registry.processes[process.incarnation] = process
            attempt.processes[process.incarnation] = process
    for row in snapshot.steps:
        attempt = registry.attempts.get(row["attempt_id"])
        if attempt is not None:
            attempt.steps[row["step"]] = Step(
                step=row["step"],
                opened_wall=row["opened_wall"] or 0.0,
                closed_wall=row["closed_wall"],
                close_reason=row["close_reason"],
            )
    for row in snapshot.stages:
        _take_span(state, row)
    for row in snapshot.payloads:
        _take_payload(state, row)
    for attempt in registry.attempts.values():
        _settle(attempt)


def _attempt(row: Mapping[str, Any]) -> Attempt:
    return Attempt(
        attempt_id=row["attempt_id"],
        run=row["run"],
        number=row["number"],
        key=row["key"],
        unkeyed=bool(row["unkeyed"]),
        opened_wall=row["opened_wall"] or 0.0,
        ended_wall=row["ended_wall"],
        first_step=row["first_step"],
        resumed_from_step=row["resumed_from_step"],
        last_closed_step=row["last_closed_step"],
        has_fingerprint=row.get("fingerprint") is not None,
    )


def _process(row: Mapping[str, Any], lease_until: float) -> Process:
    return Process(
        incarnation=row["incarnation"],
        attempt_id=row["attempt_id"],
        role=row["role"],
        rank=row["rank"],
        started=row["first_wall"] or 0.0,
        raw=bool(row["raw"]),
        world_size=row["world_size"],
        data_rank=row["data_rank"],
        node_id=row["node_id"],
        layout={name: row[name] for name in LAYOUT_COLUMNS if row.get(name) is not None},
        lease_until=lease_until,
        max_step=row["max_step"],
        finished=row["finished_wall"] is not None,
        lapsed=row["lapsed_wall"] is not None,
        bound=row["max_step"] is not None,
    )


def _work(row: Mapping[str, Any]) -> Work:
    part = Part(*(row[name] or 0 for name in PART_FIELDS))
    return Work(row["step"], row["policy_version"], row["stage"], part)


def _take_span(state: State, row: Mapping[str, Any]) -> None:
    attempt = state.registry.attempts.get(row["attempt_id"])
    if attempt is None:
        return
    work = _work(row)
    step = attempt.loose if work.step is None else attempt.steps.get(work.step)
    if step is None:
        step = attempt.steps[work.step] = Step(  # type: ignore[index]
            step=work.step or 0, opened_wall=0.0, closed_wall=0.0, ghost=True
        )
    span = Span(
        incarnation=row["incarnation"],
        role=row["role"],
        rank=row["rank"],
        work=work,
        revision=row["revision"],
        status=row["status"],
        begin_seq=row["begin_seq"],
        end_seq=row["end_seq"],
        superseded=bool(row["superseded"]),
    )
    step.spans.setdefault((span.incarnation, work.key), []).append(span)
    holders = step.holders.setdefault((span.role, span.rank, work.key), [])
    if span.incarnation not in holders:
        holders.append(span.incarnation)
    process = attempt.processes.get(span.incarnation)
    if process is not None and span.status == OPEN:
        process.open_spans.add((work.step, work.key, span.revision))


def _take_payload(state: State, row: Mapping[str, Any]) -> None:
    process = state.registry.processes.get(row["incarnation"])
    attempt = state.registry.attempts.get(row["attempt_id"])
    if process is None or attempt is None:
        return
    key, work = PayloadKey(row["incarnation"], row["seq"]), _work(row)
    process.payloads[key] = Payload(key, row["attempt_id"], work)
    step = attempt.loose if work.step is None else attempt.steps.get(work.step)
    if step is not None:
        step.pending.add(key)


def _settle(attempt: Attempt) -> None:
    """Derive what is not stored: revisions' order, who was there last, who stands where."""
    for step in [attempt.loose, *attempt.steps.values()]:
        for revisions in step.spans.values():
            revisions.sort(key=lambda span: span.revision)
    if attempt.last_closed_step in attempt.steps:
        attempt.last_closed_ranks = participants(attempt.steps[attempt.last_closed_step])
    newest: dict[tuple[str, int], Process] = {}
    for process in attempt.processes.values():
        if process.max_step is None:
            continue
        other = newest.get((process.role, process.rank))
        if other is None or other.started < process.started:
            newest[(process.role, process.rank)] = process
    for process in attempt.processes.values():
        if process.max_step is not None:
            process.replaced = newest[(process.role, process.rank)] is not process
            steps.rejoin(attempt, process)

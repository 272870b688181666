"""Processes that finish, lapse or return: their open stages and unread payloads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from stagescope_service.core import operators as operator_tables
from stagescope_service.core import payloads, spans, steps, verdicts
from stagescope_service.core.catalogue_rows import loss_row, process_row, row_id
from stagescope_service.core.entities import LOST, Attempt, Process, Span
from stagescope_service.core.instructions import Delete, Instruction, Put
from stagescope_service.core.registry import Registry
from stagescope_wire.schema import Work

STAGE_LOSS: Final = "stage"
"""The kind of the lost data of a stage that its process left open."""

LONG_GONE_SECONDS: Final = 3600.0
"""Seconds until a lapsed process is given up: ranks run on while the service is down."""


def release(attempt: Attempt, wall: float) -> None:
    """Free the memory of processes that have been gone for long; the catalogue has the rest.

    The data that distinguishes a rank's next start from this one stays. Where it stopped stays as
    well, while its attempt goes on. Once all processes of an attempt are long gone, its steps go
    too. A process that returns later continues as one whose steps have left memory.
    """
    is_over = attempt.over and not attempt.pending
    for process in attempt.processes.values():
        left = process.left_wall
        if left is None or wall - left < LONG_GONE_SECONDS or process.payloads:
            is_over = False
        elif process.settled or process.dumps or process.unbound_rows:
            for kept in (process.settled, process.reasons, process.dumps, process.unbound_rows):
                kept.clear()
            process.payloads_through = None
    if not is_over or not (attempt.steps or attempt.stepless.spans):
        return
    for process in attempt.processes.values():
        process.unfinished.clear()
        process.returned = True
    attempt.forget_steps()


def leave(
    registry: Registry,
    process: Process,
    wall: float,
    *,
    finished: bool,
    own: float | None = None,
    lost_nodes: Collection[str] = (),
    why: str = "its process reported its end",
) -> list[Instruction]:
    """Mark a process as gone: it finished (`finished`, and `why`) or its lease lapsed.

    `wall` is the service's clock, `own` the process's clock if it reported its end itself. The Ray
    cluster lost the nodes `lost_nodes`.
    """
    attempt = registry.attempt_of(process)
    steps.retire(attempt, process)
    process.left_wall = wall if own is None else own
    if finished:
        process.finished = True
    else:
        process.lapsed = True
    column = "finished_wall" if finished else "lapsed_wall"
    out: list[Instruction] = [process_row(process, **{column: process.left_wall})]
    if not finished:
        why = _silence(process, lost_nodes)
    out += abandon(attempt, process, wall, why)
    out += operator_tables.cut_off(attempt, process, wall, why)
    if not finished:
        out += lose_unread(registry, process, wall, lost_nodes)
    out += steps.end_if_left(attempt) + steps.close_due(attempt, wall)
    out += steps.end_silence(attempt, wall)
    # Processes of an earlier attempt may have left memory.
    if attempt is registry.newest(attempt.run):
        out += steps.note_never_came(attempt, wall)
    return out


def goes_on(process: Process, seq: int) -> bool:
    """Return whether a process that finished on request begins something afterwards."""
    return process.finished and process.finish_seq is not None and seq > process.finish_seq


def wake(registry: Registry, process: Process, wall: float) -> list[Instruction]:
    """Mark a process that sent something again as live."""
    attempt = registry.attempt_of(process)
    column = "finished_wall" if process.finished else "lapsed_wall"
    process.lapsed = process.finished = False
    process.left_wall = None
    out: list[Instruction] = [process_row(process, **{column: None})]
    for span, row in spans.revive(attempt, process):
        out.append(row)
        out += take_leave_back(process, span.work)
        out += _judge_span(attempt, span)
    steps.rejoin(attempt, process)
    return out + steps.resume(attempt, process) + steps.close_due(attempt, wall)


def abandon(attempt: Attempt, process: Process, wall: float, why: str) -> list[Instruction]:
    """Mark a process's open spans as unfinished, and list them as losses."""
    out: list[Instruction] = []
    for span, row in spans.abandon(attempt, process):
        out.append(row)
        out.append(stage_loss(attempt, process, span.work, f"{why} inside the stage", wall))
        out += _judge_span(attempt, span)
    return out


def lose_unread(
    registry: Registry, process: Process, wall: float, lost_nodes: Collection[str] = ()
) -> list[Instruction]:
    """Mark the payloads that no ingestor reads as lost; their holder may still offer them."""
    out: list[Instruction] = []
    for payload in [*process.payloads.values()]:
        if not payload.in_flight:
            reason = f"{_silence(process, lost_nodes)} before the payload was read"
            attempt = registry.attempts[payload.attempt_id]
            out += payloads.settle(attempt, process, payload, LOST, reason, wall)
    return out


def _silence(process: Process, lost_nodes: Collection[str]) -> str:
    lost = process.node_id is not None and process.node_id in lost_nodes
    return f"its process stopped reporting{f', lost with node {process.node_id},' if lost else ''}"


def stage_loss(attempt: Attempt, process: Process, work: Work, reason: str, wall: float) -> Put:
    """Return the loss of a stage, with the reason."""
    return loss_row(attempt, process, work, STAGE_LOSS, reason, count=1, wall=wall)


def take_leave_back(process: Process, work: Work) -> list[Instruction]:
    """Withdraw the loss of a stage, unless another of its spans is still lost."""
    if any(span.work.key == work.key for span in process.unfinished.values()):
        return []
    lost = row_id(process.incarnation, work.key, STAGE_LOSS, "")
    return [Delete("losses", {"loss_id": lost})]


def _judge_span(attempt: Attempt, span: Span) -> list[Instruction]:
    step = None if span.work.step is None else attempt.steps.get(span.work.step)
    return [] if step is None else verdicts.rejudge_rank(attempt, step, span)

"""From the state machine's objects to the catalogue's rows (the names are the columns)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from stagescope.schema import LAYOUT_COLUMNS, Event, Sender, Work
from stagescope_service.engine.entities import Attempt, Process, Span
from stagescope_service.engine.instructions import PayloadKey, Put


def work_columns(work: Work) -> dict[str, Any]:
    """Return the columns of a work's step, stage and part."""
    return work.fields()


def attempt_row(attempt: Attempt, **columns: Any) -> Put:
    """Write what is known of an attempt, and `columns` beside it."""
    return Put(
        "attempts",
        {
            "attempt_id": attempt.attempt_id,
            "run": attempt.run,
            "number": attempt.number,
            "key": attempt.key,
            "unkeyed": attempt.unkeyed,
            "opened_wall": attempt.opened_wall,
            "ended_wall": attempt.ended_wall,
            "first_step": attempt.first_step,
            "resumed_from_step": attempt.resumed_from_step,
            "last_closed_step": attempt.last_closed_step,
            **columns,
        },
    )


def process_row(process: Process, **columns: Any) -> Put:
    """Write who a process is, and `columns` beside it."""
    layout = {name: value for name, value in process.layout.items() if name in LAYOUT_COLUMNS}
    return Put(
        "processes",
        {
            "incarnation": process.incarnation,
            "attempt_id": process.attempt_id,
            "role": process.role,
            "rank": process.rank,
            "world_size": process.world_size,
            "data_rank": process.data_rank,
            "node_id": process.node_id,
            "raw": process.raw,
            "max_step": process.max_step,
            **layout,
            **columns,
        },
    )


def span_row(attempt_id: int, span: Span, **columns: Any) -> Put:
    """Write the identity and state of a span, and `columns` beside it."""
    return Put(
        "stages",
        {
            "incarnation": span.incarnation,
            "work_key": span.work.key,
            "revision": span.revision,
            "attempt_id": attempt_id,
            "role": span.role,
            "rank": span.rank,
            **work_columns(span.work),
            "status": span.status,
            "superseded": span.superseded,
            **columns,
        },
    )


def payload_row(process: Process, key: PayloadKey, work: Work, state: str, **columns: Any) -> Put:
    """Write a payload's identity and state, and `columns` beside it."""
    return Put(
        "payloads",
        {
            "incarnation": key.incarnation,
            "seq": key.seq,
            "attempt_id": process.attempt_id,
            "role": process.role,
            "rank": process.rank,
            **work_columns(work),
            "work_key": work.key,
            "state": state,
            **columns,
        },
    )


def scalar_rows(process: Process, work: Work, scalars: Mapping[str, Any], wall: float) -> list[Put]:
    """Write named numbers; what is not a number is left out (the caller counts it)."""
    return [
        Put(
            "scalars",
            {
                "incarnation": process.incarnation,
                "work_key": work.key,
                "name": name,
                "attempt_id": process.attempt_id,
                "role": process.role,
                "rank": process.rank,
                **work_columns(work),
                "value": float(value),
                "wall": wall,
            },
        )
        for name, value in scalars.items()
        if isinstance(value, int | float)
    ]


def loss_row(
    attempt: Attempt, process: Process, work: Work, kind: str, reason: str, **columns: Any
) -> Put:
    """Write something that was announced and will not arrive."""
    identity = (process.incarnation, work.key, kind, columns.pop("identity", ""))
    return Put(
        "losses",
        {
            "loss_id": digest(*identity),
            "run": attempt.run,
            "attempt_id": attempt.attempt_id,
            "role": process.role,
            "rank": process.rank,
            "step": work.step,
            "stage": work.stage,
            "kind": kind,
            "reason": reason,
            **columns,
        },
    )


def digest(*parts: object) -> str:
    """Return a short stable name for a tuple of values."""
    text = "\x1f".join(str(part) for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def sender_columns(sender: Sender, event: Event) -> dict[str, Any]:
    """Return the columns that every batch refreshes of its process."""
    return {
        "last_wall": event.wall,
        "clock_offset": sender.clock_offset,
        "clock_error": sender.clock_error,
    }

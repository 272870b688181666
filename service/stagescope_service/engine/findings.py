"""Findings: something wrong that the service noticed, with its evidence and what to try."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stagescope_service.engine.instructions import Put
from stagescope_service.engine.rows import digest

NOT_KEPT: Final = "not_kept"
"""Of an attempt: what is to be kept of payloads is not; over with the next file that is."""

NOT_AGGREGATED: Final = "step_not_aggregated"
"""Of a step: its summary could not be formed; over with the next try that succeeds."""

BEGUN_AGAIN: Final = "step_begun_again"
"""Of a rank's stage: its process began the step again within the attempt; both goes count."""


def finding(
    kind: str,
    message: str,
    *,
    run: str,
    attempt_id: int | None,
    wall: float,
    advice: str = "",
    severity: str = "warning",
    step: int | None = None,
    stage: str | None = None,
    role: str | None = None,
    rank: int | None = None,
    evidence: Mapping[str, Any] | None = None,
) -> Put:
    """Write a finding; the same kind about the same thing is one finding, however often seen."""
    return Put(
        "findings",
        {
            "finding_id": digest(kind, run, attempt_id, step, stage, role, rank),
            "run": run,
            "attempt_id": attempt_id,
            "step": step,
            "stage": stage,
            "role": role,
            "rank": rank,
            "kind": kind,
            "severity": severity,
            "message": message,
            "evidence": dict(evidence or {}),
            "advice": advice,
            "first_wall": wall,
            "last_wall": wall,
        },
    )

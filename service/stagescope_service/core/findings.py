"""Findings: something wrong that the service noticed, with its evidence and what to try."""

from __future__ import annotations

from typing import Final, TypedDict

from typing_extensions import Required

from stagescope.advice import of_run
from stagescope.wire.errors import StagescopeError
from stagescope.wire.nonfinite import JsonObject
from stagescope_service.core.catalogue_rows import row_id
from stagescope_service.core.instructions import Put

NOT_KEPT: Final = "not_kept"
"""Of an attempt: what is to be kept of payloads is not; over with the next file that is."""

NOT_AGGREGATED: Final = "step_not_aggregated"
"""Of a step: its summary could not be aggregated; over with the next try that succeeds."""

NON_FINITE_SCALARS: Final = "non_finite_scalars"
"""Of work without a step; of a step while it is open, until a rule on it fires."""

BEGUN_AGAIN: Final = "step_begun_again"
"""Of a rank's stage: its process began the step again within the attempt; both goes count."""


class FindingLocation(TypedDict, total=False):
    """The arguments of `finding` that say what it is about, and when it was seen."""

    run: Required[str | None]
    attempt_id: Required[int | None]
    wall: Required[float]
    step: int | None
    stage: str | None
    role: str | None
    rank: int | None


class FindingText(TypedDict, total=False):
    """The arguments of `finding` that say what is wrong."""

    message: Required[str]
    evidence: JsonObject
    advice: str
    severity: str


def moved(put: Put, attempt_id: int) -> Put:
    """Return a copy of a finding for another attempt of the same run."""
    is_one_of_several = put.row["finding_id"] != _finding_id(put.row)
    row = {**put.row, "attempt_id": attempt_id}
    row["finding_id"] = _finding_id(row)
    return by_message(Put("findings", row)) if is_one_of_several else Put("findings", row)


def by_message(put: Put) -> Put:
    """Return a copy of a finding whose identity includes its message."""
    finding_id = row_id(put.row["finding_id"], put.row["message"])
    return Put("findings", {**put.row, "finding_id": finding_id})


def _finding_id(row: JsonObject) -> str:
    return row_id(*(row[name] for name in _IDENTITY))


_IDENTITY: Final = ("kind", "run", "attempt_id", "step", "stage", "role", "rank")


def finding(
    kind: str,
    message: str,
    *,
    run: str | None,
    attempt_id: int | None,
    wall: float,
    advice: str = "",
    severity: str = "warning",
    step: int | None = None,
    stage: str | None = None,
    role: str | None = None,
    rank: int | None = None,
    evidence: JsonObject | None = None,
) -> Put:
    """Return a finding; one kind about one subject is one finding, however often it occurs."""
    row = {
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
        "advice": advice if run is None else of_run(advice, run),
        "first_wall": wall,
        "last_wall": wall,
    }
    return Put("findings", {"finding_id": _finding_id(row), **row})


def describe(error: BaseException) -> str:
    """Return an error as one line."""
    text = str(error) if isinstance(error, StagescopeError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:1000]

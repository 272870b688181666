"""Findings: something wrong that the service found, with its evidence and what to try."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypedDict

from typing_extensions import Required, Unpack

from stagescope_service.core.catalogue_rows import integer, one_line, plain, row_id, text
from stagescope_service.core.entities import Attempt, Process
from stagescope_service.core.instructions import AnnouncedDump, PayloadJob, Put
from stagescope_service.store.contract import Write
from stagescope_wire.errors import StagescopeError
from stagescope_wire.links import Link
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.schema import Work

NOT_KEPT: Final = "not_kept"
"""Parts of an attempt's payloads could not be kept; the next kept file ends this."""

NOT_AGGREGATED: Final = "step_not_aggregated"
"""A step's summary could not be aggregated; the next try that succeeds ends this."""

NON_FINITE_SCALARS: Final = "non_finite_scalars"
"""Scalars without a step are not finite, or those of an open step until a rule on it fires."""

BEGUN_AGAIN: Final = "step_begun_again"
"""A process began a stage of a step again within the attempt; both count."""

ATTEMPT_BUNDLED: Final = "attempt_bundled"
"""An attempt died: where the bundle of its last step is, or why there is none."""

NODE_LOST: Final = "node_lost"
"""The Ray cluster lost a node on which ranks of the attempt reported."""

PROCESS_DIED: Final = "process_died"
"""Ray recorded that the process of a rank died on its own, and not with its driver."""

REFUSED_CALL: Final = "refused_call"
"""A raw call was refused as a whole."""

REFUSED_EVENT: Final = "refused_event"
"""An event of a batch was refused."""

REFUSED_ROW: Final = "refused_row"
"""The catalogue can never accept a row: it is left out, and the rest is stored."""

STREAM_CHANGED: Final = "stream_changed"
"""An attempt's payloads do not describe a log-prob stream the same way in all steps."""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")

MAX_REASONS: Final = 20
"""Most separate findings about the refusals of one subject, by message."""
_SUBJECTS: Final = 10_000
"""Most subjects of refusals that are remembered."""
_DIGITS: Final = re.compile(r"\d+")


class FindingWork(TypedDict, total=False):
    """The step, stage and rank that a finding is about."""

    step: int | None
    stage: str | None
    role: str | None
    rank: int | None


class FindingLocation(FindingWork, total=False):
    """The subject of a finding, and when it was seen."""

    run: Required[str | None]
    attempt_id: Required[int | None]
    wall: Required[float]


class OfAttempt(TypedDict):
    """The subject of a finding: an attempt, and when it was seen."""

    run: str
    attempt_id: int
    wall: float


class OfProcess(OfAttempt):
    """The subject of a finding: a process of an attempt."""

    role: str
    rank: int


class OfWork(OfProcess):
    """The subject of a finding: what a process did."""

    step: int | None
    stage: str | None


class FindingDetails(TypedDict, total=False):
    """How severe a finding is (default: warning), its evidence, what to try and to look at."""

    evidence: JsonObject
    advice: str
    see: Iterable[Link]
    severity: str


class FindingText(FindingDetails):
    """What is wrong."""

    message: str


class FindingFields(FindingLocation, FindingDetails):
    """The fields of a finding besides its kind and message."""


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


class Refusals:
    """Distinguishes the refusals of one subject by their message, and counts each.

    A subject (a kind, run, attempt, stage, role and rank) may be refused for several reasons.
    Messages that differ in digits alone are one. Beyond `MAX_REASONS` of a subject, the others are
    one finding, with the message of the last.
    """

    def __init__(self) -> None:
        self._made: dict[str, dict[str, tuple[int, float]]] = {}
        """Subject -> finding_id -> how often it was made, and when first (Unix seconds)."""

    def forget(self, finding_id: str) -> None:
        """Forget the refusals of the subject that a finding is about."""
        self._made = {each: made for each, made in self._made.items() if finding_id not in made}

    def add(self, put: Put) -> Put:
        """Return the finding of a refusal with an identity of its own, and its count."""
        subject, wall = str(put.row["finding_id"]), float(put.row["first_wall"])
        made = self._of(subject)
        finding_id = row_id(subject, _DIGITS.sub("0", str(put.row["message"])))
        if finding_id not in made and len(made) >= MAX_REASONS:
            finding_id = subject
        count, first = made.get(finding_id, (0, wall))
        made[finding_id] = (count + 1, min(first, wall))
        columns = {"finding_id": finding_id, "count": count + 1, "first_wall": min(first, wall)}
        return Put("findings", {**put.row, **columns})

    def adopt(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Continue the counts of the findings in rows of `findings` from before a restart."""
        for row in rows:
            if row["count"] is not None and row["kind"] in (
                REFUSED_CALL,
                REFUSED_EVENT,
                REFUSED_ROW,
            ):
                counted = (int(row["count"]), float(row["first_wall"] or 0.0))
                self._of(_finding_id(row))[str(row["finding_id"])] = counted

    def _of(self, subject: str) -> dict[str, tuple[int, float]]:
        made = self._made.setdefault(subject, {})
        if len(self._made) > _SUBJECTS:
            del self._made[next(iter(self._made))]
        return made


def _finding_id(row: Mapping[str, Any]) -> str:
    return row_id(*(row[name] for name in _IDENTITY))


_IDENTITY: Final = ("kind", "run", "attempt_id", "step", "stage", "role", "rank")


def of_attempt(attempt: Attempt, wall: float) -> OfAttempt:
    """Return the subject of a finding about an attempt."""
    return {"run": attempt.run, "attempt_id": attempt.attempt_id, "wall": wall}


def of_process(attempt: Attempt, process: Process, wall: float) -> OfProcess:
    """Return the subject of a finding about a process."""
    return {**of_attempt(attempt, wall), "role": process.role, "rank": process.rank}


def of_work(attempt: Attempt, process: Process, work: Work, wall: float) -> OfWork:
    """Return the subject of a finding about what a process did in a step."""
    return {**of_process(attempt, process, wall), "step": work.step, "stage": work.stage}


def of_job(job: PayloadJob | AnnouncedDump, wall: float) -> OfWork:
    """Return the subject of a finding about a payload, or about an announced dump."""
    return {
        "run": job["run"], "attempt_id": job["attempt_id"], "step": job["step"],
        "stage": job["stage"], "role": job["role"], "rank": job["rank"], "wall": wall,
    }  # fmt: skip


def finding(kind: str, message: str, **fields: Unpack[FindingFields]) -> Put:
    """Return a finding; one kind about one subject is one finding, however often it occurs.

    Links of `see` that answer about one run get the finding's.
    """
    run = fields["run"]
    row = {
        "run": run,
        "attempt_id": fields["attempt_id"],
        "step": fields.get("step"),
        "stage": fields.get("stage"),
        "role": fields.get("role"),
        "rank": fields.get("rank"),
        "kind": kind,
        "severity": fields.get("severity", "warning"),
        "message": text(one_line(message)),
        "evidence": plain(fields.get("evidence", {})),
        "advice": text(one_line(fields.get("advice", ""))),
        "see": [link.within(run).to_json() for link in fields.get("see", ())] or None,
        "first_wall": fields["wall"],
        "last_wall": fields["wall"],
    }
    return Put("findings", {"finding_id": _finding_id(row), **row})


def refused_row(write: Write, reason: str, run: str | None, wall: float) -> Put:
    """Return the finding of a write that the catalogue can never accept.

    Its columns may hold what was refused: they are converted as for any other row.
    """
    row = write.row if isinstance(write, Put) else {}
    return finding(
        REFUSED_ROW,
        f"a row of {write.table} was left out: {reason}",
        run=run,
        attempt_id=None if run is None else integer(row.get("attempt_id")),
        step=integer(row.get("step")),
        stage=text(row.get("stage"), 200),
        role=text(row.get("role"), 100),
        rank=integer(row.get("rank")),
        wall=wall,
        severity="error",
        evidence={"table": write.table, "row": {**row}},
        advice="the other rows of this batch are stored. Report this as a fault of stagescope, "
        "with the evidence of this finding",
    )


def describe(error: BaseException) -> str:
    """Return an error as one line, without the colours that Ray gives to its messages."""
    shown = str(error) if isinstance(error, StagescopeError) else f"{type(error).__name__}: {error}"
    shown = _COLOUR.sub("", shown)
    return " ".join(shown.split())[:1000]

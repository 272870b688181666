"""The forwarded records: closed steps with their numbers, verdict and stages, and findings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Final

from stagescope import link_text
from stagescope.answers import Metrics
from stagescope.connection import Connection
from stagescope.table import Row
from stagescope.transport import Params
from stagescope_wire import nonfinite
from stagescope_wire.errors import NotFound
from stagescope_wire.links import STEP_NOUNS, Link, links_from_json, page_of_run, reworded
from stagescope_wire.nonfinite import Json

ALL_STEPS: Final = 1_000_000
_STAGE_ROWS: Final = 1_000_000
_SERIES_STEPS: Final = 20_000
"""Most steps that `/series` answers."""
_WITNESSES: Final = ("logprob_abs_diff/mean", "counts/tokens")
"""Numbers that are read for all steps at once: if one changed, the step is read again."""
_OF_ONE_STREAM: Final = ("counts/", "nonfinite/", "logprob/")
"""Beginnings of the numbers that a step has whose streams are a copy of each other."""
_IS_COMPARABLE: Final[Mapping[str, float]] = {"comparable": 1.0, "exact": 1.0, "suspect": 0.0}
_IS_COMPLETE: Final[Mapping[str, float]] = {"complete": 1.0, "partial": 0.0}
_STAGE_FIELDS: Final = (
    "stage", "role", "rank", "part", "status", "begin_wall", "end_wall", "device_seconds",
    "clock_error", "policy_version", "error_type", "error_message", "incarnation", "revision",
)  # fmt: skip
_COMMANDS: Final = STEP_NOUNS | {"exact", "findings", "lost", "steps"}
"""Nouns that advice names as a command of `stagescope`; it names others as a path of the API."""
_PENDING: Final = ("being aggregated", "not read yet")
"""Parts of a gap's text that mean that the numbers will arrive later."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClosedStep:
    """A closed step in a list; its `row_checksum` changes whenever the step changes."""

    step: int
    attempt: int
    closed_wall: float
    complete: str
    gap: str
    superseded: bool
    measured: bool
    row_checksum: str

    @property
    def is_pending(self) -> bool:
        """Whether its numbers are still being made."""
        return any(part in self.gap for part in _PENDING)


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """A step to write; `values` has only measured numbers."""

    run: str
    step: int
    attempt: int
    wall: float
    """Unix seconds: when it was closed."""
    values: Mapping[str, float]
    verdict: str
    """On its two streams; empty: it has no numbers."""
    complete: str
    gap: str
    page: str
    """Address of the step's page."""
    stages: Sequence[Row] = ()
    """Its stages by rank and part, for traces alone."""

    @property
    def text(self) -> str:
        """Attempt, verdict, completeness and gaps of the numbers, on one line."""
        facts = [f"attempt {self.attempt}", self.verdict or "no numbers", self.complete, self.gap]
        return ", ".join(fact for fact in facts if fact)

    @property
    def checksum(self) -> str:
        """Checksum of the measured values, without `gap`: retention may change that later."""
        stages = [[row.get(name) for name in _STAGE_FIELDS] for row in self.stages]
        numbers = sorted(self.values.items())
        return _checksum([self.attempt, numbers, self.verdict, self.complete, stages])


@dataclasses.dataclass(frozen=True, slots=True)
class FindingRecord:
    """Findings with one cause, as an alert."""

    finding_id: str
    kind: str
    severity: str
    title: str
    text: str
    step: int | None
    wall: float


class RunRecords:
    """Reads what is forwarded of one run.

    Args:
        connection: to the service.
        run: its name.
        page_url: address under which readers open the service's page.
    """

    def __init__(self, connection: Connection, run: str, page_url: str) -> None:
        self._connection = connection
        self.run = run
        self.page = page_of_run(page_url, run)

    def steps(self, limit: int = ALL_STEPS) -> list[ClosedStep]:
        """Return the closed steps of all attempts, of the newest `limit` ones, the oldest first."""
        rows = self._connection.table("/steps", {"run": self.run}, noun="steps", limit=limit)
        witnesses = self._witnesses(limit)
        steps = []
        for row in rows:
            if row["closed_wall"] is None:
                continue
            key = (row["attempt"], row["step"])
            names = ("closed_wall", "complete", "measured", "gap", "lost", "missing")
            seen = [*key, *(row[name] for name in names), witnesses.get(key)]
            step = ClosedStep(
                row["step"], row["attempt"], row["closed_wall"], row["complete"],
                gap=row["gap"] or "", superseded=row["superseded_by"] is not None,
                measured=bool(row["measured"]), row_checksum=_checksum(seen),
            )  # fmt: skip
            steps.append(step)
        return sorted(steps, key=lambda each: (each.step, each.attempt))

    def record(self, step: ClosedStep, *, metrics: bool = True, stages: bool = False) -> StepRecord:
        """Return a step with its numbers, or its stages."""
        values = {"step/attempt": float(step.attempt)}
        verdict = ""
        if step.complete in _IS_COMPLETE:
            values["step/complete"] = _IS_COMPLETE[step.complete]
        found = self._metrics(step) if metrics and step.measured else None
        if found is not None:
            verdict = f"{found.comparable} ({found.cause})" if found.cause else found.comparable
            if found.comparable in _IS_COMPARABLE:
                values["step/comparable"] = _IS_COMPARABLE[found.comparable]
            # Equal streams of one producer differ by 0, but that is no measurement.
            is_copy = found.comparable == "not measured"
            values |= {
                name: value
                for name, value in found.items()
                if not is_copy or name.startswith(_OF_ONE_STREAM)
            }
        rows: Sequence[Row] = ()
        if stages:
            path = f"/steps/{step.step}/stages"
            params: Params = {"run": self.run, "attempt": step.attempt}
            rows = self._connection.table(path, params, limit=_STAGE_ROWS).to_dicts()
        return StepRecord(
            self.run, step.step, step.attempt, step.closed_wall, values, verdict, step.complete,
            step.gap, self._page_of(step.step, step.attempt), rows,
        )  # fmt: skip

    def findings(self) -> list[FindingRecord]:
        """Return errors and warnings that have not ended, one record per cause."""
        noun = "findings/groups"
        groups = self._connection.table(f"/{noun}", {"run": self.run}, noun=noun)
        return [
            self._finding(row)
            for row in groups
            if row["severity"] in ("error", "warning") and row["over_wall"] is None
        ]

    def _finding(self, row: Row) -> FindingRecord:
        step = row["step"] if row["step"] is not None else row.get("first_step")
        parts = [f"{self.run}: {row['kind']}", str(row.get("where") or "")]
        page = self.page if step is None else self._page_of(step, row["attempt"])
        advice = reworded(row["advice"] or "", links_from_json(row.get("see")), _as_command)
        lines = [row["message"], advice and f"Try: {advice}", page]
        return FindingRecord(
            row["finding_id"], row["kind"], row["severity"], step=step,
            title=", ".join(filter(None, parts)), text="\n".join(filter(None, lines)),
            wall=row["first_wall"] or 0.0,
        )  # fmt: skip

    def _metrics(self, step: ClosedStep) -> Metrics | None:
        try:
            answer = self._connection.get(
                f"/steps/{step.step}/metrics", run=self.run, attempt=step.attempt
            )
        except NotFound:  # removed meanwhile
            return None
        return Metrics.from_answer(answer)

    def _witnesses(self, limit: int) -> dict[tuple[Json, Json], list[Json]]:
        """Return a few numbers and the verdict of each step by (attempt, step)."""
        found: dict[tuple[Json, Json], list[Json]] = {}
        for metric in _WITNESSES:
            try:
                answer = self._connection.get(
                    "/series", metric=metric, run=self.run, superseded=True,
                    limit=min(2 * limit, _SERIES_STEPS),
                )  # fmt: skip
            except NotFound:  # no step has numbers
                continue
            values = answer["series"][0]["values"] if answer["series"] else []
            keys = zip(answer["attempts"], answer["steps"], strict=True)
            for key, value, verdict in zip(keys, values, answer["comparable"], strict=False):
                found.setdefault(key, []).extend((value, verdict))
        return found

    def _page_of(self, step: int, attempt: int | None) -> str:
        suffix = "" if attempt is None else f"?attempt={attempt}"
        return f"{self.page}/steps/{step}{suffix}"


def _as_command(link: Link) -> str:
    return link_text.command(link, _COMMANDS)


def _checksum(fields: Sequence[object]) -> str:
    """Return a short checksum of values as JSON, in which non-finite numbers are texts."""
    text = json.dumps(nonfinite.spell(fields), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

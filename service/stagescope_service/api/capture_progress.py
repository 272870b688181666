"""The progress of a capture: which rank collected, missed or failed which step.

A rank is done with a step once it has reported every requested stage and part. That is known when
the step is closed, when the rank has begun a later step, or when it has reported all parts that it
did in each of the last steps. Before that, a complete dump says nothing about dumps to come.

Of a capture that only keeps recorded tensors, which the service does by itself, the kept files
count, once the step is closed: a rank is left out where it recorded none of these tensors.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypedDict

from stagescope.wire.captures import matches_rank, needs_ranks, unmatched_ranks
from stagescope.wire.keep import capture_selectors, kept_sections
from stagescope.wire.plan import CaptureSteps, StoredCapture
from stagescope.wire.schema import Part, RankKey
from stagescope_service.api.completeness import ALL_ROWS
from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.rows import dump_row
from stagescope_service.core.captures.agreement import (
    AGREED,
    DONE,
    Agreement,
    is_relative,
    last_step,
)
from stagescope_service.core.entities import ANNOUNCED, INGESTED
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.overview import ListedAttempt
from stagescope_service.store.tables import (
    ArtifactRow,
    CaptureRow,
    DumpRow,
    PayloadRow,
    ProcessRow,
    StageRow,
)

PartKey = tuple[str, Part]
"""A stage and its part."""
Reported = Mapping[PartKey, set[str]]
"""States of a rank's dumps in a step, by part."""

_COLLECTED: Final = "complete"
_NO_REPORT: Final = "no report"
_NOT_ASKED: Final = "not asked"
_NO_STEP: Final = "without a step"
"""Of a rank that does a requested stage only as work without a step, as an engine may."""
_NOT_KEPT: Final = "not kept"
"""Of a rank whose tensors came before the request was in force, or where there was no room."""
_STEPS_LISTED: Final = 1000
_WORST: Final = ("failed", "missed", "truncated", "skipped", "armed", _COLLECTED)
"""States of a rank's dumps in a step: the first that occurs is the state of the rank."""
_STEPS_BEFORE: Final = 2
"""Closed steps that predict the parts of a rank in a step, if they are equal."""


class RankState(NamedTuple):
    """The state of a rank in a captured step, and whether it is final."""

    state: str
    final: bool


class CapturedStep(TypedDict):
    """The result of one step of a capture; see `models.captures.CapturedStep`."""

    step: int
    attempt: int | None
    state: str
    collected: int
    waiting: list[JsonObject]
    gaps: list[JsonObject]


class RequestedRank(TypedDict):
    """A rank that a capture requests; see `models.captures.AskedRank`."""

    role: str
    rank: int
    acknowledged: bool
    there: bool
    joined_later: bool
    last_wall: float | None
    node: str | None
    host: str | None
    pid: int | None


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a capture."""

    row: CaptureRow
    agreement: Agreement
    attempt: int | None
    """Number of the run's newest attempt."""
    state: str
    ranks: Sequence[RequestedRank]
    unmatched_ranks: Sequence[int]
    steps: Sequence[CapturedStep]
    dumps: Sequence[JsonObject]

    def answer(self) -> JsonObject:
        """Return the answer of `/captures/{capture_id}`."""
        row = self.row
        return {
            "capture_id": row["capture_id"],
            "run": row["run"],
            "attempt": self.attempt,
            "state": self.state,
            "reason": self.agreement.reason,
            "order": {name: value for name, value in row["spec"].items() if name != "agreement"},
            "agreement": self.agreement.fields(),
            "created_wall": row["created_wall"],
            "removed_wall": row["removed_wall"],
            "removed_by": row["removed_by"],
            "ranks": self.ranks,
            "unmatched_ranks": self.unmatched_ranks,
            "steps": self.steps,
            "dumps": self.dumps,
        }


def progress(catalogue: Catalogue, row: CaptureRow) -> Progress:
    """Return the progress of a capture."""
    spec = row["spec"]
    agreement = Agreement.from_json(spec.get("agreement") or {})
    attempt = catalogue.find_attempt(row["run"]) if row["run"] is not None else None
    dumps = catalogue.captured(row["capture_id"], limit=ALL_ROWS)
    ranks = _requested_ranks(catalogue, spec, agreement, attempt)
    numbers = {each["attempt_id"]: each["number"] for each in catalogue.attempts(row["run"])}
    steps = _CapturedSteps(catalogue, spec, agreement, attempt, numbers).results(
        dumps, [(each["role"], each["rank"]) for each in ranks]
    )
    listed = [
        {"attempt": numbers.get(each["attempt_id"]), "step": each["step"], **dump_row(each)}
        for each in dumps
    ]
    return Progress(
        row=row,
        agreement=agreement,
        attempt=None if attempt is None else attempt["number"],
        state=_state(agreement, steps),
        ranks=ranks,
        unmatched_ranks=_unmatched_ranks(catalogue, spec, attempt, ranks),
        steps=steps,
        dumps=listed,
    )


def _requested_ranks(
    catalogue: Catalogue,
    spec: StoredCapture,
    agreement: Agreement,
    attempt: ListedAttempt | None,
) -> list[RequestedRank]:
    """Return the ranks that a capture requests, and which acknowledged its latest revision."""
    requested = {(each["role"], each["rank"]) for each in (*agreement.members, *agreement.without)}
    roles = {role for role, _ in requested} or set(spec["roles"] or ())
    newest: dict[RankKey, ProcessRow] = {}
    sizes: dict[str, int] = {}
    processes = [] if attempt is None else catalogue.processes_with_settings(attempt["attempt_id"])
    for process in processes:
        role, rank = process["role"], process["rank"]
        cannot_capture = process["raw"] or (process["hello"] or {}).get("captures") is False
        is_other_role = roles and role not in roles
        if cannot_capture or is_other_role or not matches_rank(spec["ranks"], rank):
            continue
        earlier = newest.get((role, rank))
        if earlier is None or (earlier["first_wall"] or 0.0) < (process["first_wall"] or 0.0):
            newest[role, rank] = process
        sizes[role] = max(sizes.get(role, 0), process["world_size"] or 0)
    # Once a role: for each of its processes it would be the square of the ranks.
    requested |= {
        (role, rank)
        for role, size in sizes.items()
        for rank in range(size)
        if matches_rank(spec["ranks"], rank)
    }
    return [
        _requested_rank(role, rank, newest.get((role, rank)), agreement)
        for role, rank in sorted({*newest, *requested})
    ]


def _requested_rank(
    role: str, rank: int, process: ProcessRow | None, agreement: Agreement
) -> RequestedRank:
    if process is None:
        return {
            "role": role,
            "rank": rank,
            "acknowledged": agreement.revision <= 0,
            "there": False,
            "joined_later": False,
            "last_wall": None,
            "node": None,
            "host": None,
            "pid": None,
        }
    first, agreed = process["first_wall"], agreement.agreed_wall
    return {
        "role": role,
        "rank": rank,
        "acknowledged": (process["plan_revision"] or 0) >= agreement.revision,
        "there": not (process["finished_wall"] or process["lapsed_wall"]),
        "joined_later": bool(agreed and first and first > agreed),
        "last_wall": process["last_wall"],
        "node": process["node"],
        "host": process["host"],
        "pid": process["pid"],
    }


def _unmatched_ranks(
    catalogue: Catalogue,
    spec: StoredCapture,
    attempt: ListedAttempt | None,
    ranks: Iterable[RequestedRank],
) -> list[int]:
    """Return the requested ranks that do not exist in the run's newest attempt."""
    if attempt is None:
        return []
    existing = {each["rank"] for each in ranks}
    if not needs_ranks(spec):  # then the service also serves raw callers
        existing |= {each["rank"] for each in catalogue.processes(attempt["attempt_id"])}
    return unmatched_ranks(spec["ranks"], existing)


def _state(agreement: Agreement, steps: Iterable[CapturedStep]) -> str:
    """Return a capture's state: its phase, or its result where every step is over."""
    if agreement.phase not in (AGREED, DONE):
        return agreement.phase
    states = {each["state"] for each in steps}
    ends = agreement.phase == DONE or last_step(agreement.steps) is not None
    if not ends or not states or "waiting" in states:
        return AGREED
    return next(state for state in ("partial", "complete", "empty") if state in states)


@dataclasses.dataclass(frozen=True)
class _CapturedSteps:
    """Computes the results of the steps of a capture."""

    catalogue: Catalogue
    spec: StoredCapture
    agreement: Agreement
    attempt: ListedAttempt | None
    """The run's newest; None: there is none."""
    numbers: Mapping[int, int]
    """attempt_id -> number."""

    def results(self, dumps: Iterable[DumpRow], requested: Iterable[RankKey]) -> list[CapturedStep]:
        """Return the result of each step.

        Args:
            dumps: of the capture, in every attempt.
            requested: ranks of the newest attempt that the capture requests. They count where the
                agreement has no members, because no rank existed when it came into force.
        """
        by_step = self._reports_by_step(dumps)
        newest = None if self.attempt is None else self.attempt["attempt_id"]
        members = {(each["role"], each["rank"]) for each in self.agreement.members}
        without = {(each["role"], each["rank"]) for each in self.agreement.without}
        results = []
        for (attempt_id, number), reported in sorted(by_step.items()):
            step = _Step(self.catalogue, attempt_id, number, self.spec)
            attempt = self.numbers.get(attempt_id)
            if not needs_ranks(self.spec):
                results.append(_result(number, attempt, step.kept(), step.closed))
                continue
            expected = {*members, *reported}
            if not members and attempt_id == newest:
                expected |= {*requested} - without
            # Some roles may not have these stages, as rollouts of 'all', or as roles of which no
            # rank existed at the request. It is known of a rank once it is done with the step.
            expected = {
                rank
                for rank in expected
                if rank in reported or not step.is_over(rank) or step.has_parts(rank[0])
            }
            states = {rank: step.state_of(rank, reported.get(rank, {})) for rank in expected}
            # Ranks that were left out on purpose are listed, but nothing waits for them.
            states |= {
                rank: RankState(_NOT_ASKED, True) for rank in without if rank not in reported
            }
            if step.closed:
                # A step is captured by its number, which such work does not say.
                asked = {*members, *requested} - states.keys()
                states |= {
                    rank: RankState(_NO_STEP, True) for rank in step.stepless_ranks() & asked
                }
            over = bool(states) or step.closed
            results.append(_result(number, attempt, states, over))
        return results

    def _reports_by_step(
        self, dumps: Iterable[DumpRow]
    ) -> dict[tuple[int, int], dict[RankKey, dict[PartKey, set[str]]]]:
        """Return (attempt_id, step) -> rank -> states by part, with the agreed steps to come."""
        by_step: dict[tuple[int, int], dict[RankKey, dict[PartKey, set[str]]]] = {}
        for dump in dumps:
            if dump["step"] is None:
                continue
            of_step = by_step.setdefault((dump["attempt_id"], dump["step"]), {})
            of_rank = of_step.setdefault((dump["role"], dump["rank"]), defaultdict(set))
            of_rank[_part_key(dump)].add(dump["state"] or "armed")
        if self.attempt is None or self.agreement.phase not in (AGREED, DONE):
            return by_step  # nothing is to come
        collected = {number for _, number in by_step}
        resumed = self.attempt["resumed_from_step"]
        attempt_id = self.attempt["attempt_id"]
        if is_relative(self.spec["steps"]) and self.agreement.attempt_id is not None:
            # These steps were agreed on in one attempt; another one agrees anew, or is not asked.
            attempt_id, resumed = self.agreement.attempt_id, None
        for number in _listed_steps(self.agreement.steps):
            if number in collected and resumed is not None and number <= resumed:
                continue  # an earlier attempt collected it, and this one will not repeat it
            by_step.setdefault((attempt_id, number), {})
        return by_step


class _Step:
    """A captured step, and which rank does which parts in it."""

    def __init__(
        self, catalogue: Catalogue, attempt_id: int, number: int, spec: StoredCapture
    ) -> None:
        self._catalogue, self._attempt_id, self._number = catalogue, attempt_id, number
        self._spec = spec
        self._stages = None if spec["stages"] == "all" else list(spec["stages"])
        rows = catalogue.steps(attempt_id, before=number + 1, limit=_STEPS_BEFORE + 1)
        own = [row for row in rows if row["step"] == number]
        # A trainer may have no step of that number: it is over with a later one.
        known = own or catalogue.steps(attempt_id, limit=_STEPS_BEFORE)
        self.closed = any(row["step"] >= number and row["closed_wall"] is not None for row in known)
        earlier = [row for row in rows if row["step"] < number and row["closed_wall"] is not None]
        self._before = [row["step"] for row in earlier[:_STEPS_BEFORE]]
        self._parts_by_step: dict[int, dict[RankKey, set[PartKey]]] = {}
        self._parts: dict[RankKey, int] | None = None
        self._roles: set[str] | None = None
        self._newest_steps: dict[RankKey, int] | None = None

    def parts(self) -> Mapping[RankKey, int]:
        """Return how many parts of the requested stages each rank did."""
        if self._parts is None:
            self._parts = {}
            counts = self._catalogue.count_stages(
                self._attempt_id, self._number, stage=self._stages
            )
            for (stage, role, rank), count in counts.items():
                if self._is_requested(stage):
                    self._parts[role, rank] = self._parts.get((role, rank), 0) + count
        return self._parts

    def kept(self) -> dict[RankKey, RankState]:
        """Return the ranks that recorded requested tensors, or whose payloads may still hold some.

        Of scalars only what was kept is known, not what was recorded.
        """
        selectors = frozenset(capture_selectors(self._spec))
        found: dict[RankKey, list[RankState]] = defaultdict(list)
        files = self._catalogue.artifacts(
            self._attempt_id, self._number, kind="kept", deleted=None, limit=ALL_ROWS
        )
        # What another process did again does not count: it may have died with its payloads.
        passed = self._catalogue.replaced(self._attempt_id, self._number)
        for file in files:
            sections = (file["sections"] or {}).items()
            if self._is_of_request(file) and any(
                section in selectors or kept_sections(selectors, file["stage"], names, names)
                for section, names in sections
            ):
                passed.add((file["incarnation"], file["seq"]))
                found[file["role"], file["rank"]].append(RankState(_COLLECTED, True))
        payloads = self._catalogue.payloads(
            self._attempt_id, self._number, stage=self._stages, limit=ALL_ROWS
        )
        for payload in payloads:
            key = payload["incarnation"], payload["seq"]
            if key in passed or not self._is_of_request(payload):
                continue
            states = found[payload["role"], payload["rank"]]
            if payload["state"] == ANNOUNCED:
                states.append(RankState(_NO_REPORT, False))
            elif payload["state"] != INGESTED:
                states.append(RankState(payload["state"], True))
            elif kept_sections(selectors, payload["stage"], payload["tensors"] or ()):
                states.append(RankState(_NOT_KEPT, True))
        return {
            # What is open comes first, then what is not there.
            rank: min(states, key=lambda each: (each.final, each.state == _COLLECTED))
            for rank, states in found.items()
            if states
        }

    def _is_of_request(self, row: ArtifactRow | PayloadRow) -> bool:
        roles = self._spec["roles"]
        return (
            (self._stages is None or row["stage"] in self._stages)
            and (not roles or row["role"] in roles)
            and matches_rank(self._spec["ranks"], row["rank"])
        )

    def stepless_ranks(self) -> set[RankKey]:
        """Return the ranks that did a requested stage, by its name, without a step."""
        if self._stages is None:
            return set()
        counts = self._catalogue.count_stages(self._attempt_id, None, stage=self._stages)
        return {(role, rank) for _, role, rank in counts}

    def state_of(self, rank: RankKey, reported: Reported) -> RankState:
        """Return the state of a rank, given the states of its dumps."""
        states = set[str]().union(*reported.values()) if reported else set()
        worst = next((state for state in _WORST if state in states), _NO_REPORT)
        over = self.is_over(rank)
        if over and worst in (_COLLECTED, _NO_REPORT):
            is_complete = self.parts().get(rank, 0) <= len(reported)
            return RankState(worst if is_complete else _NO_REPORT, True)
        if over:
            return RankState(worst, worst != "armed")
        return RankState(worst, "armed" not in states and self._has_reported_all(rank, reported))

    def has_parts(self, role: str) -> bool:
        """Return whether a rank of a role did a part of the requested stages."""
        if self._roles is None:
            self._roles = {each for each, _ in self.parts()}
        return role in self._roles

    def is_over(self, rank: RankKey) -> bool:
        """Return whether a rank will do nothing more in the step."""
        return self.closed or self._has_left(rank)

    def _has_left(self, rank: RankKey) -> bool:
        """Return whether a rank has begun a later step."""
        if self._newest_steps is None:
            self._newest_steps = {}
            for row in self._catalogue.processes(self._attempt_id):
                key = (row["role"], row["rank"])
                step = -1 if row["max_step"] is None else row["max_step"]
                self._newest_steps[key] = max(step, self._newest_steps.get(key, -1))
        return self._newest_steps.get(rank, -1) > self._number

    def _has_reported_all(self, rank: RankKey, reported: Reported) -> bool:
        """Return whether a rank of an open step has reported all parts of each step before it."""
        if not reported or not self._before:
            return False
        usual = [self._parts_in(number).get(rank, set()) for number in self._before]
        begun = self._parts_in(self._number).get(rank, set())
        is_regular = all(parts == usual[0] for parts in usual)
        return is_regular and reported.keys() >= {*usual[0], *begun}

    def _parts_in(self, number: int) -> Mapping[RankKey, set[PartKey]]:
        """Return the parts of the requested stages that each rank did in a step."""
        if number not in self._parts_by_step:
            parts: defaultdict[RankKey, set[PartKey]] = defaultdict(set)
            rows = self._catalogue.stages(
                self._attempt_id, number, stage=self._stages, limit=ALL_ROWS
            )
            for row in rows:
                if self._is_requested(row["stage"]):
                    parts[row["role"], row["rank"]].add(_part_key(row))
            self._parts_by_step[number] = parts
        return self._parts_by_step[number]

    def _is_requested(self, stage: str) -> bool:
        # 'all' leaves out the rollout, which runs in an inference engine.
        return self._stages is not None or stage != "rollout_generate"


def _part_key(row: StageRow | DumpRow) -> PartKey:
    return row["stage"], Part.of_columns(row)


def _listed_steps(steps: CaptureSteps | None) -> list[int]:
    """Return the numbers of the steps of an agreement, as far as they are known."""
    if isinstance(steps, Mapping):
        if "next" in steps:
            return []
        count = steps.get("count")
        if count is None:
            return []
        start = steps["start"] or 0
        return [start + number * steps["every"] for number in range(min(count, _STEPS_LISTED))]
    return steps[:_STEPS_LISTED] if isinstance(steps, list) else []


def _result(
    step: int,
    attempt: int | None,
    states: Mapping[RankKey, RankState],
    over: bool,
) -> CapturedStep:
    waiting = [rank for rank, (_, final) in states.items() if not final]
    gaps: list[JsonObject] = [
        {"role": role, "rank": rank, "state": state}
        for (role, rank), (state, final) in sorted(states.items())
        if state not in (_COLLECTED, "armed") and (final or state != _NO_REPORT)
    ]
    collected = sum(final and state == _COLLECTED for state, final in states.values())
    if waiting or not over:
        state = "waiting"
    elif gaps:
        state = "partial"
    else:
        state = "complete" if collected else "empty"
    return {
        "step": step,
        "attempt": attempt,
        "state": state,
        "collected": collected,
        "waiting": [{"role": role, "rank": rank} for role, rank in sorted(waiting)],
        "gaps": gaps,
    }

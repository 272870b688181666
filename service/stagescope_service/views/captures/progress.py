"""The progress of a capture: which rank collected, missed or failed which step.

A rank is done with a step once it has reported every requested stage and part. This is known if the
step is closed, or if the rank has begun a later step. It is also known if the rank has reported all
parts that it did in each of the last steps. Before that, more dumps may come.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from stagescope_service.core.captures.agreement import (
    AGREED,
    DONE,
    Agreement,
    is_relative,
    last_step,
)
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.overview import ListedAttempt
from stagescope_service.store.tables import CaptureRow, DumpRow, ProcessRow
from stagescope_service.views.captures.captured_step import (
    COLLECTED,
    NO_REPORT,
    PartKey,
    RankState,
    Reported,
    StepOfCapture,
    part_key,
)
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.captures import AskedRank, CapturedStep, RankGap
from stagescope_service.views.reading.completeness import ALL_ROWS
from stagescope_service.views.reading.rows import dump_row
from stagescope_wire.captures import matches, matches_rank, needs_ranks, unmatched_ranks
from stagescope_wire.nonfinite import Json
from stagescope_wire.plan import CaptureScope, CaptureSteps, StoredCapture
from stagescope_wire.schema import RankKey

_NOT_ASKED: Final = "not asked"
_NO_STEP: Final = "without a step"
"""State of a rank that does a requested stage only outside of steps, as an engine may."""
_STEPS_LISTED: Final = 1000
_KEPT_LISTED: Final = 100
"""Newest steps of an attempt that are listed for a request without an end."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a capture."""

    row: CaptureRow
    agreement: Agreement
    attempt: int | None
    """Number of the run's newest attempt."""
    state: str
    ranks: Sequence[AskedRank]
    unmatched_ranks: Sequence[int]
    steps: Sequence[CapturedStep]
    dumps: Sequence[JsonObject]
    unread_dumps: int
    """Number of dumps whose operators are not read yet."""

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
            "unread_dumps": self.unread_dumps,
        }


def progress(catalogue: Catalogue, row: CaptureRow) -> Progress:
    """Return the progress of a capture.

    It reads everything at one moment. Otherwise a rank that goes on during the reads would seem
    done with the step, without the report that it sent before.
    """
    with catalogue.snapshot() as found:
        return _progress(found, row)


def _progress(catalogue: Catalogue, row: CaptureRow) -> Progress:
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
        unread_dumps=catalogue.count_unread_dumps(row["capture_id"]),
    )


def _requested_ranks(
    catalogue: Catalogue, spec: StoredCapture, agreement: Agreement, attempt: ListedAttempt | None
) -> list[AskedRank]:
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
) -> AskedRank:
    known: Mapping[str, Json] = process or {}
    first, agreed = known.get("first_wall"), agreement.agreed_wall
    return {
        "role": role,
        "rank": rank,
        "acknowledged": (known.get("plan_revision") or 0) >= agreement.revision,
        "there": bool(known) and not (known["finished_wall"] or known["lapsed_wall"]),
        "joined_later": bool(agreed and first and first > agreed),
        "last_wall": known.get("last_wall"),
        "node": known.get("node"),
        "host": known.get("host"),
        "pid": known.get("pid"),
    }


def _unmatched_ranks(
    catalogue: Catalogue,
    spec: StoredCapture,
    attempt: ListedAttempt | None,
    ranks: Iterable[AskedRank],
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
    # They come by attempt: the later result of a repeated step replaces the earlier one.
    states = {*{each["step"]: each["state"] for each in steps}.values()}
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
    """The run's newest attempt; None: there is none."""
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
            step = StepOfCapture(self.catalogue, attempt_id, number, self.spec)
            attempt = self.numbers.get(attempt_id)
            if not needs_ranks(self.spec):
                results.append(self._of_kept(step, number, attempt, reported))
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

    def _of_kept(
        self,
        step: StepOfCapture,
        number: int,
        attempt: int | None,
        reported: Mapping[RankKey, Reported],
    ) -> CapturedStep:
        """Return the result of a step whose recorded tensors the service keeps."""
        states = step.kept()
        # A rank asks whether a tensor is kept before it copies one that is needed for nothing else.
        states |= {rank: RankState("missed", True) for rank in reported}
        if step.closed:
            states |= {
                rank: RankState(_NO_STEP, True)
                for rank in step.stepless_ranks() - states.keys()
                if step.includes(rank)
            }
        result = _result(number, attempt, states, step.is_settled)
        if result["state"] == "empty":
            return {**result, "gap": step.rows_removed}
        # Where something is missing, it is not known what it held.
        is_known = result["state"] == "complete" and "all" not in self.spec["keep"]
        return {**result, "unrecorded": sorted(step.unrecorded) if is_known else []}

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
            of_rank[part_key(dump)].add(dump["state"] or "armed")
        if not needs_ranks(self.spec):
            by_step = {key: by_step.get(key, {}) for key in [*by_step, *self._kept_steps()]}
        if self.attempt is None or self.agreement.phase not in (AGREED, DONE):
            return by_step  # nothing is to come
        collected = {number for _, number in by_step}
        resumed = self.attempt["resumed_from_step"]
        attempt_id = self.attempt["attempt_id"]
        if is_relative(self.spec["steps"]) and self.agreement.attempt_id is not None:
            # These steps were agreed on in one attempt; another one agrees again, or is not asked.
            attempt_id, resumed = self.agreement.attempt_id, None
        for number in _listed_steps(self.agreement.steps):
            of_attempt = attempt_id
            if resumed is not None and number <= resumed:
                if number in collected:
                    continue  # an earlier attempt collected it, and this one will not repeat it
                if not needs_ranks(self.spec):
                    of_attempt = self._earlier_attempt_with(number) or attempt_id
            by_step.setdefault((of_attempt, number), {})
        return by_step

    def _earlier_attempt_with(self, number: int) -> int | None:
        """Return the newest of the earlier attempts that did a step."""
        for attempt_id in sorted(self.numbers, key=lambda each: -self.numbers[each])[1:]:
            rows = self.catalogue.steps(attempt_id, before=number + 1, limit=1)
            if rows and rows[0]["step"] == number:
                return attempt_id
        return None

    def _kept_steps(self) -> Iterator[tuple[int, int]]:
        """Yield (attempt_id, step) of the agreed steps that have kept files."""
        steps, only = self.agreement.steps, None
        if is_relative(self.spec["steps"]):
            only = self.agreement.attempt_id
        if steps is None or self.attempt is None or self.agreement.phase not in (AGREED, DONE):
            return
        scope: CaptureScope = {"stages": "all", "roles": None, "ranks": "all", "steps": steps}
        for attempt_id in self.numbers:
            if only in (None, attempt_id):
                for step in self.catalogue.newest_kept_steps(attempt_id, limit=_KEPT_LISTED):
                    if matches(scope, stage="", role="", rank=0, step=step):
                        yield attempt_id, step


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
    step: int, attempt: int | None, states: Mapping[RankKey, RankState], over: bool
) -> CapturedStep:
    waiting = [rank for rank, (_, final) in states.items() if not final]
    gaps: list[RankGap] = [
        {"role": role, "rank": rank, "state": state}
        for (role, rank), (state, final) in sorted(states.items())
        if state not in (COLLECTED, "armed") and (final or state != NO_REPORT)
    ]
    collected = sum(final and state == COLLECTED for state, final in states.values())
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
        "gap": None,
        "unrecorded": [],
    }
